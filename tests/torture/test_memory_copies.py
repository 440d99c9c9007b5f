"""Ranks that are killed between checkpoints go on from the copies in memory: rows, weights and
moments are those of a run that nobody touched, and so are the checkpoints that follow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.torture.conftest import Ranks, job_of
from tests.torture.faults import Fault
from tests.torture.test_disk import log_of, whole_steps
from tests.torture.test_kills import end_of
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder

KEEP = {"keep_last": 9}


def pair(layout: str, tmp_path: Path, **keep: Any) -> tuple[RunFolder, RunFolder]:
    """A run that nobody touches, and one with a copy of every step; both save once in 6 steps."""
    jobs = [
        job_of(layout, tmp_path / name, keep={**KEEP, **more}, save_interval=6)
        for name, more in (("left", {}), ("killed", {"memory_interval": 1, **keep}))
    ]
    return new_run(jobs[0]), new_run(jobs[1])


def kill_at(
    run: RunFolder, step: int, victims: slice, mark: Path | None = None
) -> Callable[[list[int]], None]:
    """Once the run has come to a step, and there is a mark."""

    def during(pids: list[int]) -> None:
        while Path(f"/proc/{pids[0]}").exists():
            if (steps(run) or [0])[-1] >= step and (mark is None or mark.exists()):
                break
            time.sleep(0.002)
        for pid in pids[victims]:
            os.kill(pid, signal.SIGKILL)

    return during


def damage(path: Path) -> None:
    """A bit of the data in both slots of a file."""
    content = bytearray(path.read_bytes())
    for slot in (0, len(content) // 2):
        content[slot + len(content) // 2 - 5000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("interval", "steps_of"), [("0.001s", range(2, 12)), ("1000s", [2])])
def test_copies_by_time(
    interval: str, steps_of: Sequence[int], ranks: Ranks, tmp_path: Path
) -> None:
    more = {"memory_interval": interval, **KEEP}
    left, killed = (
        new_run(job_of("DP2", tmp_path / name, keep=keep, save_interval=12))
        for name, keep in (("left", KEEP), ("killed", more))
    )
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    assert ranks.run(left, 2) == [0, 0]
    assert any(ranks.run(killed, 2, during=kill_at(killed, 4, slice(0, 2)), more=memory))
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    restored = json.loads(killed.attempt(1).restored.read_text())
    assert restored["source"] == "memory" and restored["step"] in steps_of
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


@pytest.mark.parametrize(
    "layout",
    [
        "DP2 ZeRO 3, Muon",
        "PP2",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("DP2", "TP2")),
    ],
)
def test_killed_ranks_lose_a_step_at_most(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    left, killed = pair(layout, tmp_path)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    for step, victims in ((2, slice(0, 2)), (4, slice(1, 2)), (8, slice(0, 1))):
        assert any(ranks.run(killed, 2, during=kill_at(killed, step, victims), more=memory))
        restored = json.loads(killed.attempt(1).restored.read_text()) if step > 2 else None
        assert restored is None or restored["source"] == "memory"
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    restored = json.loads(killed.attempt(1).restored.read_text())
    assert restored["source"] == "memory" and restored["step"] >= 7
    assert restored["disk_step"] == 6
    assert facts(killed) == facts(left)
    assert end_of(killed) == end_of(left)


PARTS = [
    ("memory", "before", False),
    ("seal", "before", True),
    ("seal", "after", False),
    pytest.param("memory", "after", True, marks=pytest.mark.slow),
    pytest.param("seal", "before", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("part", "when", "everybody"), PARTS)
def test_a_kill_in_a_copy_leaves_the_one_before(
    part: str, when: str, everybody: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """Of step 5, at one rank or at both: which of 4 and 5 all have is gone on from."""
    left, killed = pair("DP2", tmp_path)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    fault: Fault = {"do": "kill", "at": part, "when": when, "call": 5, "rank": 1}
    assert -signal.SIGKILL in ranks.run(killed, 2, [fault | {"all": everybody}], more=memory)
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    restored = json.loads(killed.attempt(1).restored.read_text())
    sealed = (part, when) == ("seal", "after")
    assert restored["source"] == "memory" and restored["step"] in ((4, 5) if sealed else (4,))
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


def test_a_damaged_copy_of_one_rank_is_no_copy(ranks: Ranks, tmp_path: Path) -> None:
    """An older one that all have whole is taken, and where there is none, the checkpoint."""
    left, killed = pair("DP2", tmp_path)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    assert any(ranks.run(killed, 2, during=kill_at(killed, 9, slice(0, 2)), more=memory))
    damage(tmp_path / "1.state")
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    restored = json.loads(killed.attempt(1).restored.read_text())
    assert restored == {
        "schema": "restored/1",
        "source": "disk",
        "step": 6,
        "disk_step": 6,
    }
    assert "rank 1: the copy of step" in killed.attempt(1).log(1).read_text()
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


def test_a_checkpoint_that_was_under_way_is_made_again(ranks: Ranks, tmp_path: Path) -> None:
    """Behind training it was lost with the ranks, while training had gone on from its step."""
    left, killed = pair("DP2", tmp_path, save_async=True)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    mark = tmp_path / "mark"
    hold: Fault = {
        "do": "sleep",
        "at": "manifest",
        "when": "before",
        "call": 1,
        "seconds": 600.0,
        "mark": str(mark),
    }
    kill = kill_at(killed, 8, slice(0, 2), mark)
    assert any(ranks.run(killed, 2, [hold], kill, more=memory))
    assert not published_folders(killed.checkpoints)
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    restored = json.loads(killed.attempt(1).restored.read_text())
    assert restored["source"] == "memory" and restored["step"] >= 7
    assert whole_steps(killed) == [restored["step"], 12]
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)
