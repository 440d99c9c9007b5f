"""The models: plain modules, as one device runs them."""
