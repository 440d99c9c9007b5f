"""What a run tells of itself while it trains."""
