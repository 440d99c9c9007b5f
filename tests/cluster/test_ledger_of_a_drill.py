"""The ledger of a real run, beside a clock of the test's own: three kills, a resume on another
layout, checkpoints and evaluations."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

import pytest

from tests.conftest import Project, wait_for
from tests.launch.live_runs import rank_pids, slow_down
from trainkit.reports.read import read_report
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import last_step

SAVED_EVERY = 5
ROUNDING = 0.02  # seconds: events have milliseconds, and there are some dozen


@dataclass
class Sight:
    """What the test saw of one attempt: (not before, not after) by step; each is certain."""

    began: float
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    killed: float = 0.0
    ended: float = 0.0


def watch(run: RunFolder, sight: Sight, file: int, until: int) -> None:
    """Look at the rows until a step is there. `file`: the metrics as they were before; a resumed
    run writes another file."""
    before = sight.began
    newest = None
    while newest is None or newest < until:
        now = time.time()
        if run.metrics.exists() and run.metrics.stat().st_ino != file:
            seen = last_step(run)
            for step in range(seen if newest is None else newest + 1, seen + 1):
                sight.steps[step] = (before, time.time())
            newest = seen
        before = now
        time.sleep(0.005)


@pytest.mark.slow  # four runs; tests/reports/test_ledger.py has the same by a clock of its own
def test_the_bins_of_a_real_run(project: Project) -> None:
    slow_down(project, 40)
    sights: list[Sight] = []
    lost: list[tuple[float, float]] = []
    words = ["train", "random"]
    inode = -1
    for kill_at, layout in ((8, 2), (17, 2), (23, 1)):
        sight = Sight(time.time())
        process = project.start(*words)
        wait_for(project.runs, "the run folder")
        run = RunFolder(project.runs()[0])
        pids = rank_pids(project, len(sights) + 1)
        watch(run, sight, inode, kill_at)
        saved = max(s for s in sight.steps if s % SAVED_EVERY == 0 and s + 1 in sight.steps)
        sight.killed = time.time()
        os.kill(pids[0], signal.SIGKILL)
        process.communicate()
        sight.ended = time.time()
        sights.append(sight)
        not_before, not_after = sight.steps[saved][0], sight.steps[saved + 1][1]
        lost.append((sight.killed - not_after, sight.ended - not_before))
        inode = run.metrics.stat().st_ino
        words = ["resume", "last", "--set", f"cluster.ranks_per_node={layout}"]
        time.sleep(1.0)
    final = Sight(time.time())
    project.invoke(*words)
    final.ended = time.time()
    ledger = read_report(run).ledger
    seconds = ledger.seconds
    assert sum(seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert ledger.wall_seconds <= final.ended - sights[0].began + ROUNDING
    assert ledger.wall_seconds >= final.began - sights[0].steps[1][1] - ROUNDING
    assert sum(pair[0] for pair in lost) - ROUNDING <= seconds["lost"]
    assert seconds["lost"] <= sum(pair[1] for pair in lost) + ROUNDING
    begins = [*(sight.began for sight in sights[1:]), final.began]
    waited = sum(b - sight.ended for b, sight in zip(begins, sights, strict=True))
    assert seconds["idle"] >= waited - ROUNDING
    steps = sum(sight.killed - min(sight.steps.values())[1] for sight in sights)
    busy = sum(seconds[bin] for bin in ("training", "data", "checkpoint", "evaluation", "lost"))
    assert steps - ROUNDING <= busy
    assert seconds["queue"] == seconds["compile"] == 0
    assert min(seconds[bin] for bin in ("start", "training", "checkpoint", "evaluation")) > 0
