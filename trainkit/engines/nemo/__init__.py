"""NVIDIA's NeMo, as the launchers of 22.09 (bignlp-scripts) and 24.12 start it."""
