"""Which hosts there are, which of them a run takes, and which are in quarantine."""
