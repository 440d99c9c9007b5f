"""trainkit: language-model pretraining from raw text to a trained model, from one jobs.toml."""

__version__ = "0.1.0"
