"""The weights of a model by their names here, from wherever they lie: what every export and
conversion reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Model
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.manifest import TensorEntry
from trainkit.train.checkpoint.dcp_storage import DTYPES, DcpReader, TensorLoadPlanner
from trainkit.train.huggingface.names import Shape, table, with_output_factor

NAMED = 20  # problems named in one message
EMBEDDING = "embed_tokens.weight"
TARGETS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NamedWeights(Protocol):
    """Whole tensors by the names of `table`, read one at a time."""

    @property
    def folder(self) -> Path:
        """Where they lie, to be named in messages."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of all tensors there are."""

    def read(self, name: str) -> Tensor:
        """One tensor, whole."""


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a checkpoint of ours, as other programs compute with them."""

    saved: Checkpoint
    model: Model

    @property
    def folder(self) -> Path:
        return self.saved.folder

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {
            name.removeprefix("model."): entry.shape
            for name, entry in self.saved.manifest.tensors.items()
            if name.startswith("model.")
        }

    def read(self, name: str) -> Tensor:
        ours = f"model.{name}"
        found = read_tensor(self.saved.folder, ours, self.saved.manifest.tensors[ours])
        return with_output_factor(name, found, self.model, 1 / self.model.width_factor)


def read_tensor(folder: Path, name: str, entry: TensorEntry) -> Tensor:
    """One tensor of a checkpoint, whole, by this process alone."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    with warnings.catch_warnings():
        # one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        read_tensors(
            {name: tensor},
            storage_reader=DcpReader(folder, {name: entry}),
            planner=TensorLoadPlanner(),
            no_dist=True,
        )
    return tensor


def in_dtype(name: str, found: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the dtype that is asked for; biases that choose experts in fp32, for they move by
    less than 16 bits hold. Raises ConfigError where fp16 cannot hold it."""
    if name.endswith(".expert_bias"):
        dtype = torch.float32
    converted = found.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), found.isfinite()):
        raise ConfigError(
            f"{name} has weights up to {found.abs().max():g}, beyond fp16's 65504",
            hint="export with --dtype bf16 or fp32",
        )
    return converted


def vocabulary(weights: NamedWeights) -> int:
    """Rows of the embedding; 1 without it: `refuse_another_model` says what is wrong then."""
    shape = weights.shapes.get(EMBEDDING)
    return shape[0] if shape else 1


def refuse_another_model(weights: NamedWeights, model: Model, rows: int) -> None:
    """Raise ConfigError, with all reasons, unless `weights` are those of a model.

    Args:
        weights: what was found.
        model: the shape.
        rows: of the embedding.
    """
    there = weights.shapes
    wanted = {name: entry.shape for name, entry in table(model, rows).items()}
    problems = [f"{name} is not in it" for name in wanted if name not in there]
    problems += [
        f"{name} is {list(there[name])} there, {list(shape)} in the job's model"
        for name, shape in wanted.items()
        if there.get(name, shape) != shape
    ]
    problems += [f"{name} is not in the job's model" for name in there if name not in wanted]
    if problems:
        raise ConfigError(
            [
                Problem(f"{weights.folder} is a checkpoint of another model: {problem}")
                for problem in problems[:NAMED]
            ]
        )
