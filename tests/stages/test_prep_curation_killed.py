"""Curation killed at random moments: what is there afterwards is what would have been there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess

import pytest

from tests.conftest import Project, wait_for
from tests.stages.curation_project import below, write_project
from tests.stages.test_prep_data_killed import processes

PREPARE = ("prep-data", "--dataset", "crawl")


def torture(project: Project, shards: int, kills: int, seed: int) -> None:
    write_project(project, shards=shards)
    project.invoke(*PREPARE)
    expected, took = below(project), 3.0
    assert {"curated/00000.jsonl.zst", "curated/curation.json", "words/dataset.json"} <= set(
        expected
    )
    dice, killed, complete = random.Random(seed), {"task": 0, "unit": 0}, True
    while sum(killed.values()) < kills:
        # else it goes on where it was cut off
        process = project.start(*PREPARE, *(["--force"] if complete else []))
        victim = 0
        try:
            process.wait(dice.uniform(0.1, 0.9) * took)
            took *= 0.7
        except subprocess.TimeoutExpired:
            took = min(4.0, 1.1 * took)
            found = processes(project, process.pid)
            victim = dice.choice(found[1:] if len(found) > 1 and dice.random() < 0.6 else found)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode in (0, 6, -signal.SIGKILL) and "Traceback" not in err, (out, err)
        killed["task" if victim == process.pid else "unit"] += process.returncode != 0
        complete = process.returncode == 0
        wait_for(lambda: len(processes(project, 0)) == 1, "units to end with their task")
    assert kills < 20 or min(killed.values()) > 2, killed
    project.invoke(*PREPARE)
    assert below(project) == expected
    assert not list(project.path.rglob("*.tmp-*"))
    assert "is sound" in project.invoke("data-verify", "crawl").stdout


def test_killed_anywhere_ends_in_the_same_bytes(project: Project) -> None:
    torture(project, shards=2, kills=6, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_thirty_times(project: Project) -> None:
    torture(project, shards=5, kills=30, seed=4)
