"""Tasks of a checkout: tests and benchmarks."""
