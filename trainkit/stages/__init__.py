"""What must be done first: freshness, stamps, order."""
