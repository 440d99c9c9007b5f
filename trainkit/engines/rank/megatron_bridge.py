"""Megatron-Bridge's lines and checkpoints: Megatron-LM's, with two files more in each folder.

Source: Megatron-Bridge 0.6, training/checkpointing.py, save_checkpoint: train_state.pt, the tracker
and then run_config.yaml, without which a folder is taken for one of Megatron-LM's and not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainkit.engines.rank import megatron_lm
from trainkit.engines.rank.megatron_lm import read_line, tracked_step
from trainkit.engines.rank.readings import FoundCheckpoint
from trainkit.engines.rank.saved_files import archive_problem

__all__ = ["found_checkpoints", "read_line", "tracked_step"]
CONFIG = "run_config.yaml"
STATE = "train_state.pt"


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first."""
    return [
        replace(found, problems=(*found.problems, *_problems(found.folder)))
        for found in megatron_lm.found_checkpoints(folder)
    ]


def _problems(place: Path) -> Iterator[str]:
    if not place.is_dir():
        return
    try:
        text = (place / CONFIG).read_bytes()
    except OSError:
        text = b""
    if not text.endswith(b"\n"):
        yield f"{CONFIG} is missing or cut short"
    state = archive_problem(place / STATE)
    if state is not None:
        yield state
