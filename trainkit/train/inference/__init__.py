"""What is done with a trained model: evaluate, generate, replay."""
