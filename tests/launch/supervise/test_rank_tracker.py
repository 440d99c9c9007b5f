"""Whom a hang blames."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.jobs.clusters import WatchLimits
from trainkit.launch.protocol.frames import StackReport
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.rank_tracker import StackDumps
from trainkit.runs.folder import AttemptFolder


def frame(states: dict[str, str], silent: tuple[str, ...] = ()) -> StackReport:
    stacks = {rank: "File x.py" for rank in states if rank not in silent}
    return StackReport(stacks, silent, states)


@pytest.mark.parametrize(
    ("said", "suspects"),
    [
        # a loop of the job's own that waits for ever answers where it is
        (frame({"0": "S", "1": "S"}), ()),
        (frame({"0": "S", "1": "R"}), ()),
        (frame({"0": "S", "1": "T"}, ("1",)), ()),  # somebody stopped it
        (frame({"0": "S", "1": "D"}, ("1",)), ("h1",)),  # it waits for its disk or its driver
        (frame({"0": "S", "1": "S"}, ("1",)), ("h1",)),
    ],
)
def test_a_host_is_suspected_only_where_its_ranks_cannot_answer(
    tmp_path: Path, said: StackReport, suspects: tuple[str, ...]
) -> None:
    attempt = AttemptFolder(tmp_path / "attempts" / "1")
    pulse, stacks = Heartbeats(attempt, WatchLimits()), StackDumps(attempt)
    pulse.beats = {0: {"phase": "train", "step": 8}, 1: {"phase": "train", "step": 7}}
    stacks.take(0, said)
    hang = stacks.judge(pulse, [0, 1], lambda rank: f"h{rank}", 600.0)
    assert (
        hang.suspects == suspects
        and hang.root_cause is not None
        and hang.root_cause["missing"] == [1]
    )
