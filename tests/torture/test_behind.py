"""Saves behind training: what is written are the weights of that step, however long their copy
takes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.runs.folder import RunFolder


def hashes(run: RunFolder, step: int) -> list[str]:
    manifest = json.loads((run.checkpoints / f"step-{step:08d}/manifest.json").read_text())
    return [file["xxh128"] for file in manifest["files"]]


def test_an_update_waits_for_a_slow_copy(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": True}))
    slow = {
        "do": "sleep",
        "at": "copy",
        "call": 2,
        "when": "before",
        "seconds": 1.0,
        "mark": str(tmp_path / "mark"),
        "rank": 1,
    }
    assert ranks.run(run, 2, [slow]) == [0, 0], log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]
    assert [hashes(run, step) for step in (3, 6, 9, 12)] == [
        hashes(reference, step) for step in (3, 6, 9, 12)
    ]


def test_a_kill_while_it_is_copied_costs_two_intervals_at_most(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": True}))
    assert -signal.SIGKILL in ranks.run(
        run, 2, [{"do": "kill", "at": "copy", "call": 3, "when": "before", "rank": 1}]
    )
    assert whole_steps(run)[:1] == [3] and whole_steps(run)[-1] in (3, 6)
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]
