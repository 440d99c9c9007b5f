"""What ranks do in the tests of checkpoints from any layout into any, and of an overflow that
one rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tests.train.layouts import Case, Rank, gathered, rank_of_world, take_steps
from trainkit.runs.checkpoints import checkpoint_folder, open_checkpoint
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.torch_compat import local_part

SAVED_AT = 2  # steps before the checkpoint
MORE = 2  # steps after it
State = dict[str, NDArray[Any]]


def _sizes(rank: Rank, first: int, steps: int) -> list[tuple[int, int]]:
    size = rank.job.global_batch_size
    return [(size * step, size) for step in range(first, first + steps)]


class Stretch(NamedTuple):
    """MORE steps of a training: what a checkpoint at their beginning holds and one at their end
    would, whole, on rank 0, and what the steps were."""

    state: State
    end: State
    losses: list[float]
    checksums: list[float]


def _go_on(rank: Rank, root: Path, first: int) -> Stretch:
    """From step `first`, and save below `root`/checkpoints."""
    state = gathered(rank.step.tensors())
    values = take_steps(rank, _sizes(rank, first, MORE))
    _save(rank, root, first + MORE)
    end = gathered(rank.step.tensors())
    return Stretch(state, end, [v.loss for v in values], [v.checksum for v in values])


def _save(rank: Rank, root: Path, step: int) -> None:
    metadata = CheckpointMetadata(step, step * rank.job.global_batch_size, state=rank.step.state())
    checkpoint.save(root / "checkpoints", rank.step.tensors(), metadata)


def save_in(case: Case, root: Path) -> Stretch:
    """Train, save at SAVED_AT, go on, and save again."""
    with rank_of_world(case, root) as rank:
        take_steps(rank, _sizes(rank, 0, SAVED_AT))
        _save(rank, root, SAVED_AT)
        return _go_on(rank, root, SAVED_AT)


def load_in(case: Case, root: Path, to: Path, first: int = SAVED_AT) -> Stretch:
    """Read the checkpoint of step `first` below `root` in any layout, go on, and save below
    `to`."""
    with rank_of_world(case, root) as rank:
        saved = open_checkpoint(checkpoint_folder(root / "checkpoints", first))
        checkpoint.load(saved, rank.step.tensors(), rank.step.expected())
        rank.step.after_loading()
        rank.step.load_state(saved.manifest.state)
        return _go_on(rank, to, first)


def overflow_in(case: Case, root: Path, where: int) -> dict[str, Any]:
    """Three fp16 steps. In the second one element of one gradient of rank `where` is infinite,
    after all of the step's sums: nobody else sees it but by what the ranks agree on. What this
    rank held before and after it and at the end, the scales and what was skipped."""
    with rank_of_world(case, root) as rank:
        (first, second, third), step = _sizes(rank, 0, 3), rank.step
        values = take_steps(rank, [first])
        before = _copies(rank)
        backward = step.backward

        def broken(*words: Any) -> Any:
            result = backward(*words)
            if rank.mesh.place == place_of_rank(rank, where):
                gradient = next(
                    local_part(p.grad)
                    for p in step.parameters.values()
                    if p.grad is not None and local_part(p.grad).numel()
                )
                gradient.view(-1)[0] = torch.inf
            return result

        step.backward = broken  # type: ignore[method-assign, assignment]
        values += take_steps(rank, [second])
        step.backward = backward  # type: ignore[method-assign]
        after = _copies(rank)
        values += take_steps(rank, [third])
        return {
            "kept": all(np.array_equal(before[name], after[name]) for name in before),
            "went on": any(
                not np.array_equal(after[name], value) for name, value in _copies(rank).items()
            ),
            "overflows": [v.overflow for v in values],
            "scales": [v.scale for v in values],
            "losses": [v.loss for v in values],
            "applied": int(step.optimizer.applied_steps()),
        }


def place_of_rank(rank: Rank, number: int) -> Any:
    """Where a rank of this world stands."""
    from trainkit.jobs.ranks import coordinates_of

    return coordinates_of(number, rank.mesh.degrees)


def _copies(rank: Rank) -> State:
    """What this rank holds of weights and moments."""
    return {
        f"{name} {at}": part.numpy().copy()
        for name, shards in rank.step.tensors().items()
        for at, part in shards.parts.items()
    }
