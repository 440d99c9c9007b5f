"""neuronx-nemo-megatron's lines and checkpoints: NeMo's, but that it goes on from the file that
its command line names, whatever that is called.

Source: inject_model_parallel_rank of nemo/utils/model_utils.py at f4743ce; the comment at the end
of test.sh beside it.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.engines.rank.nemo import found_checkpoints, read_line, saved_names
from trainkit.engines.rank.saved_files import newest_whole as newest_of

__all__ = ["found_checkpoints", "grid", "newest_whole", "read_line", "tracked_step"]


def newest_whole(folder: Path) -> Path | None:
    """The path of the newest whole checkpoint, without the folders of its ranks, which the engine
    puts in by itself."""
    found = newest_of(found_checkpoints(folder))
    return None if found is None else found.folder


def tracked_step(folder: Path) -> int | None:
    """The iteration of the newest whole checkpoint: one that was cut short is passed over."""
    found = newest_of(found_checkpoints(folder))
    return None if found is None else found.step


def grid(folder: Path) -> tuple[int, ...]:
    """(tensor,) or (tensor, pipeline) ranks of the newest whole checkpoint; () where it has no
    folders of ranks."""
    place = newest_whole(folder)
    for saved in saved_names(folder):
        if saved.place == place and () not in saved.ranks:
            return tuple(1 + max(each) for each in zip(*saved.ranks))
    return ()
