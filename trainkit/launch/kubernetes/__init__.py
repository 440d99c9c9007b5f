"""Runs as JobSets of Kubernetes, which Kueue may queue; their supervisor lives in a pod."""
