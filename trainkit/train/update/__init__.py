"""What a step does to weights: gradients, loss scale, norm, schedule, optimizer."""
