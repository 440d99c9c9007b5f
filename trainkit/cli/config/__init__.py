"""Tasks that show what a job, a plan, a dataset is."""
