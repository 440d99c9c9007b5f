"""Tasks that look at what runs left: runs, logs, checkpoints, why."""
