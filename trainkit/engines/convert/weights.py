"""An engine's checkpoint as named weights: its tensors gathered from all ranks, held against the
job's model before any of them is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from torch import Tensor

from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.convert.experts import read_together, shapes_apart
from trainkit.engines.convert.tensors import EngineTensor, as_tensor, part_shape, whole
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import Shape, table

NAMED = 20  # problems named in one message


@dataclass(frozen=True)
class EngineWeights:
    """Named weights that lie in an engine's files. The vocabulary's padding is left out.

    Args:
        folder: of the checkpoint.
        model: the job's.
        vocab_size: rows of the embedding.
        stored: by our name, experts apart, how each is stored and the parts of the tensor-parallel
            ranks.
        notes: what a reader should know of how they were read.
    """

    folder: Path
    model: Model
    vocab_size: int
    stored: Mapping[str, tuple[EngineTensor, tuple[Tensor, ...]]]
    notes: tuple[str, ...] = ()

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: entry.shape for name, entry in table(self.model, self.vocab_size).items()}

    def read(self, name: str) -> Tensor:
        return read_together(name, self.model, self._read_one)

    def _read_one(self, name: str) -> Tensor:
        how, parts = self.stored[name]
        found = whole(parts, how, self.model)
        if how.split == "vocabulary":
            return found[: self.vocab_size].clone()
        return found


def gather(
    folder: Path,
    model: Model,
    vocab_size: int,
    plan: Sequence[EngineTensor],
    ranks: Sequence[Mapping[str, object]],
) -> EngineWeights:
    """The weights of a checkpoint, held against the model.

    Args:
        folder: of the checkpoint, to be named.
        model: the job's.
        vocab_size: rows of the embedding without padding.
        plan: all tensors of the model as the engine stores them.
        ranks: by the engine's names, the tensors of every tensor-parallel rank.

    Raises:
        ConfigError: exit 3, the checkpoint is of another model; all reasons.
    """
    problems = list(_name_problems(plan, ranks))
    if not problems:
        stored = {
            how.ours: (
                how,
                tuple(as_tensor(rank[how.theirs], how.theirs, folder) for rank in ranks),
            )
            for how in plan
        }
        problems = list(_shape_problems(model, vocab_size, stored))
    if problems:
        raise ConfigError(
            [Problem(problem, SourceLocation(str(folder))) for problem in problems[:NAMED]]
        )
    return EngineWeights(folder, model, vocab_size, stored, tuple(_drift_notes(stored)))


def _name_problems(
    plan: Sequence[EngineTensor], ranks: Sequence[Mapping[str, object]]
) -> Iterator[str]:
    wanted = {how.theirs for how in plan}
    for number, rank in enumerate(ranks):
        for name in sorted(wanted - rank.keys()):
            yield f"{name} is not in it (tensor-parallel rank {number})"
        for name in sorted(rank.keys() - wanted):
            yield f"{name} is not in the job's model (tensor-parallel rank {number})"


def _shape_problems(
    model: Model,
    vocab_size: int,
    stored: Mapping[str, tuple[EngineTensor, tuple[Tensor, ...]]],
) -> Iterator[str]:
    shapes = shapes_apart(model, vocab_size)
    padding = set[int]()
    for name, (how, parts) in stored.items():
        shape = shapes[name]
        if how.split == "vocabulary":
            rows = sum(len(part) for part in parts)
            padding.add(rows)
            if rows < vocab_size:
                yield f"{how.theirs} has {rows} rows there, the job's vocabulary {vocab_size}"
                continue
            shape = (rows, *shape[1:])
        expected = part_shape(shape, how, len(parts))
        for number, found in enumerate(parts):
            if tuple(found.shape) != expected:
                yield (
                    f"{how.theirs} is {list(found.shape)} there, {list(expected)} in the job's"
                    f" model (tensor-parallel rank {number} of {len(parts)})"
                )
    if len(padding) > 1:
        yield f"embedding and head have {' and '.join(map(str, sorted(padding)))} rows"


def _drift_notes(
    stored: Mapping[str, tuple[EngineTensor, tuple[Tensor, ...]]],
) -> Iterator[str]:
    """Copies that ranks should have alike."""
    apart = {}
    for how, parts in stored.values():
        if how.split == "replicated" and len(parts) > 1:
            difference = max(float((p.double() - parts[0].double()).abs().max()) for p in parts)
            if difference:
                apart[how.theirs] = difference
    if apart:
        yield (
            f"{len(apart)} tensors differ between tensor-parallel ranks that should be alike, by up"
            f" to {max(apart.values()):g}; their mean is taken"
        )
