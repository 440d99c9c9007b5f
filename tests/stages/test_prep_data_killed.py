"""Processes of prep-data killed at random moments, and asked to stop: what is there afterwards
is what would have been there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HANGS, Project, alive, wait_for
from tests.data.fetch_server import Site
from tests.stages.web_project import lines, published, write_jobs


@pytest.fixture
def site(project: Project) -> Iterator[Site]:
    with published(project) as site:
        yield site


def output(project: Project) -> dict[str, bytes]:
    folder = project.path / "data/many/gpt2"
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def processes(project: Project, task: int) -> list[int]:
    """The task and its units: whoever names a spec of this project on its command line."""
    marker, found = str(project.path / "stamps").encode(), [task]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def torture(project: Project, site: Site, shards: int, kills: int, seed: int) -> None:
    site.files |= {f"/many/{i:03d}.jsonl.zst": lines(1000 + i, 3 + i % 7) for i in range(shards)}
    write_jobs(project, site, shards)
    project.invoke("prep-data", "--dataset", "many")
    expected, took = output(project), 1.0
    assert set(expected) == {
        "tokenizer.json",
        "dataset.json",
        "many_text_document.bin",
        "many_text_document.idx",
    }
    dice, killed, complete = random.Random(seed), {"task": 0, "unit": 0}, True
    while sum(killed.values()) < kills:
        # else it goes on where it was cut off
        process = project.start(
            "prep-data", "--dataset", "many", *(["--force"] if complete else [])
        )
        victim = 0
        try:
            process.wait(dice.uniform(0.1, 0.9) * took)
            took *= 0.7  # it was done before: how fast this machine is comes out soon
        except subprocess.TimeoutExpired:
            took *= 1.1
            found = processes(project, process.pid)
            victim = dice.choice(found[1:] if len(found) > 1 and dice.random() < 0.6 else found)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode in (0, 6, -signal.SIGKILL) and "Traceback" not in err, (out, err)
        killed["task" if victim == process.pid else "unit"] += process.returncode != 0
        complete = process.returncode == 0
        wait_for(lambda: len(processes(project, 0)) == 1, "units to end with their task")
    assert kills < 10 or min(killed.values()) > 2, killed
    project.invoke("prep-data", "--dataset", "many")
    assert output(project) == expected
    assert not [p for p in project.path.rglob("*.tmp-*") if "published" not in p.parts]
    assert "is sound" in project.invoke("data-verify", "many").stdout


def test_killed_anywhere_ends_in_the_same_bytes(project: Project, site: Site) -> None:
    torture(project, site, shards=6, kills=5, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_twenty_times_among_forty_shards(project: Project, site: Site) -> None:
    torture(project, site, shards=40, kills=20, seed=4)


LATE_TERM = """
import os, signal, subprocess

def late(self, *rest):
    former(self, *rest)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        try:
            os.unlink(os.environ["TERM_ONCE"])
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGTERM)

former, subprocess.Popen.__del__ = subprocess.Popen.__del__, late
"""


def test_term_within_a_finalizer_is_not_lost(project: Project, site: Site) -> None:
    """Python ignores what a signal's handler raises within a `__del__`."""
    site.files |= {f"/many/{i:03d}.jsonl.zst": lines(1000 + i, 5) for i in range(3)}
    write_jobs(project, site, 3)
    site.held["/many/002.jsonl.zst"] = last = threading.Event()
    (project.path / "sitecustomize.py").write_text(LATE_TERM)
    (once := project.path / "once").touch()
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "prep-data", "--dataset", "many", "--workers", "1"],
        check=False,
        cwd=project.path,
        env=project.environment(PYTHONPATH=str(project.path), TERM_ONCE=str(once)),
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    last.set()
    assert not once.exists()
    assert done.returncode == 130 and "what was finished is kept" in done.stderr, done
    project.invoke("prep-data", "--dataset", "many")


def test_term_stops_like_ctrl_c(project: Project, site: Site) -> None:
    """SIGTERM: workers end, finished units are kept, exit 130."""
    site.files |= {f"/many/{i:03d}.jsonl.zst": lines(1000 + i, 5) for i in range(8)}
    write_jobs(project, site, 8)
    site.held["/many/007.jsonl.zst"] = last = threading.Event()  # so that it is not done before
    process = project.start("prep-data", "--dataset", "many", "--workers", "1")
    units = project.path / "stamps/prep-data/many--gpt2.units"
    wait_for(
        lambda: [
            path for path in units.glob("fetch-*.json") if not path.name.endswith(".spec.json")
        ],
        "a unit to be finished",
    )
    others = [pid for pid in processes(project, process.pid) if pid != process.pid]
    process.terminate()
    out, err = process.communicate()
    last.set()
    assert process.returncode == 130 and "what was finished is kept" in err, (out, err)
    assert not [pid for pid in others if alive(pid)]
    kept = {
        p.name: p.stat().st_mtime_ns
        for p in units.glob("fetch-*.json")
        if not p.name.endswith(".spec.json")
    }
    assert kept
    project.invoke("prep-data", "--dataset", "many")
    assert all((units / name).stat().st_mtime_ns == time for name, time in kept.items())
