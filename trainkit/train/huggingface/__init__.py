"""Hugging Face folders, read as the weights a run begins with and written from its checkpoints.
torch is imported only when weights move."""

from trainkit.train.huggingface.folder import check_weights
from trainkit.train.huggingface.hub import weights_folder
from trainkit.train.huggingface.reading import load_weights

__all__ = ["check_weights", "load_weights", "weights_folder"]
