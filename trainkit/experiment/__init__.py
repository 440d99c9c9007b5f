"""Experiments from Python: plan, prepare, run, follow. The command line parses and prints only."""
