"""Megatron-Bridge's lines and checkpoints: Megatron-LM's, with two files more in each folder.

Source: Megatron-Bridge 0.6, training/checkpointing.py, save_checkpoint: train_state.pt, two
trackers, and at the end run_config.yaml. A folder without it is taken for one of Megatron-LM's, and
not loaded. trainkit says which step is loaded, so that no tracker counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainkit.engines.rank.megatron_lm import FOLDER, load_problems, read_line
from trainkit.engines.rank.readings import FoundCheckpoint
from trainkit.engines.rank.saved_files import archive_problem, judged, newest_whole, saved_steps

__all__ = ["found_checkpoints", "read_line", "tracked_step"]
CONFIG = "run_config.yaml"
STATE = "train_state.pt"


def tracked_step(folder: Path) -> int | None:
    """The newest whole checkpoint."""
    newest = newest_whole(found_checkpoints(folder))
    return None if newest is None else newest.step


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first."""
    return judged(saved_steps(folder, FOLDER), _problems)


def _problems(_step: int, place: Path) -> Iterator[str]:
    yield from load_problems(place)
    try:
        text = (place / CONFIG).read_bytes()
    except OSError:
        text = b""
    if not text.endswith(b"\n"):
        yield f"{CONFIG} is missing or cut short"
    state = archive_problem(place / STATE)
    if state is not None:
        yield state
