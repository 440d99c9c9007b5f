"""Megatron's .bin/.idx on disk: format, reading, manifest, statistics, verification."""
