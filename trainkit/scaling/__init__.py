"""From runs of several sizes to a law of the loss, and from a budget to a ladder of jobs."""
