"""engine = "megatron-bridge"."""
