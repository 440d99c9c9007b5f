"""Tasks that start, stop and follow a run."""
