"""What is asked of hosts outside a run: health, set-up, bandwidth, remote commands."""
