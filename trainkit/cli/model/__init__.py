"""Tasks that use a trained model: generate, evaluate, export, convert."""
