"""Lines and checkpoints of the engine (to be filled in)."""

from __future__ import annotations

from pathlib import Path

from trainkit.engines.rank.readings import Evaluation, FoundCheckpoint, Iteration


def read_line(text: str) -> Iteration | Evaluation | None:
    return None


def tracked_step(folder: Path) -> int | None:
    return None


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    return []
