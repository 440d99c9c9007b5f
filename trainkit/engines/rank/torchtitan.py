"""torchtitan's lines and checkpoints.

A line of our own in its log says a step (engines/torchtitan/inside/metrics.py); the checkpoints are
those of torch.distributed.checkpoint (its components/checkpointer/dcp.py, 0.3.0).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from trainkit.engines.rank.printed import plain
from trainkit.engines.rank.readings import EvaluationLine, FoundCheckpoint, Iteration
from trainkit.engines.rank.saved_files import (
    distributed_problems,
    judged,
    newest_whole,
    saved_steps,
)

# "[trainkit] {"step": 3, "loss": 6.7, ...}"
MARK = "[trainkit] "
_FOLDER = re.compile(r"step-([0-9]{1,18})")


def read_line(text: str) -> Iteration | EvaluationLine | None:
    """What a line of any rank's output says, or None. One rank prints them."""
    _, mark, said = plain(text).rpartition(MARK)
    try:
        found = json.loads(said) if mark else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return None
    if "valid" in found:
        return EvaluationLine(found["step"], "valid", _number(found["valid"]))
    return Iteration(
        step=found["step"],
        train_iters=found.get("train_iters"),
        elapsed_ms=_number(found.get("elapsed_ms")),
        learning_rate=_number(found.get("learning_rate")),
        lm_loss=_number(found.get("loss")),
        grad_norm=_number(found.get("grad_norm")),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def tracked_step(folder: Path) -> int | None:
    """The newest whole checkpoint: trainkit says which one torchtitan loads."""
    newest = newest_whole(found_checkpoints(folder))
    return None if newest is None else newest.step


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first."""
    return judged(saved_steps(folder, _FOLDER), lambda _, place: distributed_problems(place))
