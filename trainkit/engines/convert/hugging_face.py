"""A Hugging Face folder as named weights, to compare with what was written into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.folder import StoredTensor, open_weights, problems_of
from trainkit.train.huggingface.names import Shape, TensorMapping, table
from trainkit.train.huggingface.reading import TensorFiles


@dataclass(frozen=True)
class HuggingFaceWeights:
    """Named weights that lie in safetensors files, which are open."""

    folder: Path
    entries: Mapping[str, TensorMapping]
    stored: Mapping[str, StoredTensor]
    files: TensorFiles

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        columns = (slice(None),) * (len(entry.shape) - 1)
        rows = []
        for piece in entry.pieces:
            stop = piece.start + piece.rows
            rows.append(
                self.files.read(self.stored[piece.source], piece, piece.start, stop, columns)
            )
        return torch.cat(rows)


@contextmanager
def open_hugging_face(folder: Path, model: Model, vocab_size: int) -> Iterator[HuggingFaceWeights]:
    """Open a folder until the block ends. Raises ConfigError where it is of another model."""
    weights = open_weights(folder, model.architecture.hugging_face)
    if problems := problems_of(folder, weights, model, vocab_size):
        raise ConfigError(problems)
    with TensorFiles() as files:
        yield HuggingFaceWeights(folder, table(model, vocab_size), weights.tensors, files)
