"""engine = "torchtitan"."""
