"""A job with other values, again and again: its runs, their results, the best of them."""
