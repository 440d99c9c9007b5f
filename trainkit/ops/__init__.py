"""Fused operations beside their plain torch references, and who chooses between them."""
