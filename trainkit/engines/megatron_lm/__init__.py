"""engine = "megatron-lm": unmodified trees of NVIDIA/Megatron-LM."""
