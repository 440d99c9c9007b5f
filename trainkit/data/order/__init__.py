"""Which samples a step sees: the native order, Megatron's, blends."""
