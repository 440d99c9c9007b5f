"""Rules of attention's windows in a model's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.families.contract import Family
from trainkit.jobs.table import wrong


def check_windows(said: Mapping[str, Any], family: Family) -> None:
    """Keys of windows that say nothing, or nothing good, without another; `said` of a model of a
    family. Raises an error of a rule."""
    window = said["sliding_window"]
    if window is None:
        if family.sliding_window_pattern:
            raise wrong(
                "family", f"family {family.name!r} has layers with a window: set sliding_window"
            )
        for key in ("sliding_window_pattern", "sliding_rotary_base"):
            if said[key] is not None:
                raise wrong(key, f"{key} without sliding_window: no layer has a window")
    elif window > said["seq_length"]:
        raise wrong(
            "sliding_window",
            f"sliding_window {window} is longer than seq_length {said['seq_length']}: no layer"
            " would hide anything",
        )
