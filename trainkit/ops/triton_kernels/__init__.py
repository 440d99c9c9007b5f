"""The operations for NVIDIA GPUs, in Triton. Importing a file here needs triton and compiles
nothing."""
