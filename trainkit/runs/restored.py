"""attempts/N/restored.json: what the ranks of an attempt went on from."""

from __future__ import annotations

from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record


@dataclass(frozen=True)
class Restored(Record):
    """The form restored/1; of an attempt that began at the beginning there is none.

    Args:
        source: "memory": each rank's own copy; "partner": that, and another host's for ranks that
            lost theirs; "disk": a checkpoint.
        step: training went on from there.
        disk_step: of the newest checkpoint; -1: there was none.
    """

    SCHEMA = "restored/1"
    source: Literal["memory", "partner", "disk"]
    step: int
    disk_step: int
