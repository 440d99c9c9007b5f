"""What ranks do in the tests of checkpoints from any layout into any, and of an overflow that
one rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def _go_on(rank: Rank) -> tuple[list[float], list[float]]:
    """(losses, checksums of the samples) of the next steps."""
    values = take_steps(rank, _sizes(rank, SAVED_AT, MORE))
    return [v.loss for v in values], [v.checksum for v in values]


def save_in(case: Case, root: Path) -> tuple[State, list[float], list[float]]:
    """Train, save below `root`/checkpoints, go on; all that was saved, whole, on rank 0, and
    what the next steps were."""
    with rank_of_world(case, root) as rank:
        take_steps(rank, _sizes(rank, 0, SAVED_AT))
        consumed = SAVED_AT * rank.job.global_batch_size
        metadata = CheckpointMetadata(SAVED_AT, consumed, state=rank.step.state())
        checkpoint.save(root / "checkpoints", rank.step.tensors(), metadata)
        return gathered(rank.step.tensors()), *_go_on(rank)


def load_in(case: Case, root: Path) -> tuple[State, list[float], list[float]]:
    """Read that checkpoint in another layout, and go on."""
    with rank_of_world(case, root) as rank:
        saved = open_checkpoint(checkpoint_folder(root / "checkpoints", SAVED_AT))
        checkpoint.load(saved, rank.step.tensors(), rank.step.expected())
        rank.step.after_loading()
        rank.step.load_state(saved.manifest.state)
        return gathered(rank.step.tensors()), *_go_on(rank)


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
