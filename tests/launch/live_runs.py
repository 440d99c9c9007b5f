"""Runs that are under way: their events, their ranks' processes, and the step they have reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import Project, wait_for


def events(run: Path, attempt: int = 1) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / f"attempts/{attempt}/events.jsonl").read_text().splitlines()
    ]


def rank_pids(project: Project, attempt: int = 1, runs: int = 1) -> dict[int, int]:
    """Pids of the newest run's ranks once there are so many runs and all ranks of this attempt
    have been started."""

    def started() -> dict[int, int]:
        found = project.runs()
        path = found[-1] / f"attempts/{attempt}/events.jsonl" if len(found) >= runs else None
        if path is None or not path.exists() or '"go"' not in path.read_text():
            return {}
        return {
            e["rank"]: e["pid"] for e in events(found[-1], attempt) if e["event"] == "rank_started"
        }

    pids = wait_for(started, "the ranks to start")
    assert isinstance(pids, dict)
    return pids


def wait_for_step(project: Project, step: int) -> None:
    path = project.runs()[-1] / "metrics.jsonl"
    wait_for(
        lambda: (
            path.exists()
            and any(f'"step": {s},' in path.read_text() for s in range(step, step + 5))
        ),
        f"step {step}",
    )


def slow_down(project: Project, train_iters: int = 4000) -> None:
    """Make the job on random tokens last, so that there is time to kill it."""
    project.edit_jobs("train_iters = 30", f"train_iters = {train_iters}")
