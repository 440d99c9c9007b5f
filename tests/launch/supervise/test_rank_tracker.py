"""Whom a hang blames."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainkit.jobs.clusters import WatchLimits
from trainkit.launch.protocol.frames import StackReport
from trainkit.launch.supervise.hang import StackDumps
from trainkit.launch.supervise.heartbeats import Heartbeats
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


def answer(entered: dict[str, int], *waits: tuple[str, int]) -> str:
    """Of a rank in groups of three, with the collectives that it waits in."""
    return json.dumps(
        {
            "entered": entered,
            "waits": [
                {
                    "operation": "all_reduce",
                    "number": number,
                    "group": group,
                    "about": f"about {group}",
                    "ranks": [0, 1, 2],
                }
                for group, number in waits
            ],
        }
    )


STACK = """Thread 0x1 (most recent call first):
  File "other.py", line 1 in other
{}hread 0x2 (most recent call first):
  File "inner.py", line 7 in inner
  File "outer.py", line 8 in outer
"""
WAITING = answer({"0": 7}, ("0", 7))


@pytest.mark.parametrize(
    ("waits", "states", "missing", "said"),
    [
        # another has not come, and computes
        (
            [WAITING, WAITING, answer({"0": 6})],
            ["S", "S", "R, ran or wanted to 99% of the time"],
            [2],
            r"rank 2 on h2 \(step 7, train, runs at inner.py:7 \(inner\)\); ranks 0, 1 wait in"
            r" all_reduce #7 of group 0 \(about 0\)$",
        ),
        # a rank that has been there and gone on is not missing; nor is who waits elsewhere
        (
            [answer({"0": 7, "1": 1}), answer({"0": 7, "1": 2}, ("1", 2)), WAITING],
            ["S", "S", "S"],
            [0],
            r"rank 0 on h0 \(step 7, train, is at inner.py:7 \(inner\)\); rank 1 waits in"
            r" all_reduce #2 of group 1 \(about 1\)$",
        ),
        # each waits for another
        (
            [answer({"0": 7}, ("0", 7)), answer({"0": 6, "1": 1}, ("1", 1)), WAITING],
            ["S", "S", "S"],
            [0, 1, 2],
            r"rank 1 on h1 \(step 7, train, waits in all_reduce #1 of group 1 \(about 1\)\)",
        ),
        # its stack came from C, its interpreter did not answer
        (
            [WAITING, "", WAITING],
            ["S", "S", "S"],
            [1],
            r"rank 1 on h1 \(step 7, train, holds the interpreter's lock, is at inner.py:7",
        ),
        # stopped by somebody; what it does not answer follows from that
        ([WAITING, "", WAITING], ["S", "T", "S"], [1], r"rank 1 on h1 \(step 7, train, stopped\)"),
        # a disk, with what it waits for in the kernel
        ([WAITING, "", WAITING], ["S", "D nfs_wait", "S"], [1], "for a disk or a driver"),
        # what nobody understands is no answer to anything
        (["[", '{"waits": 1}', "{}"], ["S", "S", "S"], [], "all are at the same step"),
    ],
)
def test_who_keeps_the_others_waiting(
    tmp_path: Path, waits: list[str], states: list[str], missing: list[int], said: str
) -> None:
    attempt = AttemptFolder(tmp_path / "attempts" / "1")
    pulse, stacks = Heartbeats(attempt, WatchLimits()), StackDumps(attempt)
    pulse.beats = {rank: {"phase": "train", "step": 7} for rank in range(3)}
    for rank, (waiting, state) in enumerate(zip(waits, states, strict=True)):
        text = STACK.format("T" if rank else "Current t")
        stacks.take(
            rank, StackReport({str(rank): text}, (), {str(rank): state}, {str(rank): waiting})
        )
    assert stacks.may_pass == any(state[0] == "D" for state in states)
    cause = stacks.judge(pulse, range(3), lambda rank: f"h{rank}", 600.0).root_cause
    assert cause is not None and cause["missing"] == missing
    assert re.search(said, cause["message"]), cause["message"]
    stacks.write()
    written = (tmp_path / "attempts/1/stacks/2.txt").read_text()
    assert ("waits in all_reduce #7" in written) == (waits[2] == WAITING)


@pytest.mark.parametrize("state", ["S, a thread D folio_wait", "t", "D"])
def test_what_a_disk_or_a_debugger_holds_may_pass(tmp_path: Path, state: str) -> None:
    stacks = StackDumps(AttemptFolder(tmp_path))
    stacks.take(0, frame({"0": "S", "1": "R, ran or wanted to 30% of the time", "2": "T"}))
    assert not stacks.may_pass
    stacks.take(1, frame({"3": state}))
    assert stacks.may_pass
