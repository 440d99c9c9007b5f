"""The model, free of any word of parallelism."""
