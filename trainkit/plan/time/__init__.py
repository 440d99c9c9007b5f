"""How long a step takes: a model of its terms, with constants fitted on public timings."""
