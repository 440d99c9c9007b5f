"""Disks that fail: training goes on or stops as docs/checkpoints.md says, and nothing that was
whole is lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.torture.conftest import Ranks, job_of
from tests.torture.faults import Fault
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.checkpoints import published_folders, step_of, verify
from trainkit.runs.folder import RunFolder


def whole_steps(run: RunFolder) -> list[int]:
    """Steps of the checkpoints; all of them must be whole, and nothing else may lie there."""
    assert all(verify(folder) == [] for folder in published_folders(run.checkpoints))
    assert not list(run.checkpoints.glob("*.tmp"))
    return [step_of(folder) for folder in published_folders(run.checkpoints)]


def log_of(run: RunFolder) -> str:
    return run.attempt(1).log(0).read_text()


FAULTS: list[Fault] = [
    {"do": errno.ENOSPC, "at": "byte", "byte": 5000, "rank": 1},
    {"do": errno.EIO, "at": "byte", "byte": 0, "rank": 0},
    {"do": errno.EROFS, "at": "prepare", "when": "before"},
    {"do": errno.EDQUOT, "at": "manifest", "when": "before"},
    {"do": errno.EIO, "at": "publish", "when": "before"},
]


def failing_saves() -> Iterator[Any]:
    """Each fault, saves in training's way and behind it in turn; the other way round is slow."""
    for number, fault in enumerate(FAULTS):
        for behind in (False, True):
            marks = [] if behind == bool(number % 2) else [pytest.mark.slow]
            yield pytest.param(
                fault,
                behind,
                marks=marks,
                id=f"{errno.errorcode[fault['do']]} at {fault['at']}-{behind}",
            )


@pytest.mark.parametrize(("fault", "save_async"), list(failing_saves()))
def test_one_save_that_fails_is_a_warning(
    fault: Fault, save_async: bool, ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    """The second of four saves fails; the others and the losses are as if nothing had been."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": save_async}))
    assert ranks.run(run, 2, [{**fault, "call": 2}]) == [0, 0], log_of(run)
    assert whole_steps(run) == [3, 9, 12]
    assert facts(run) == facts(reference)
    name = {
        errno.ENOSPC: "No space left on device",
        errno.EIO: "Input/output error",
        errno.EROFS: "Read-only",
        errno.EDQUOT: "quota exceeded",
    }[fault["do"]]
    (warning,) = [line for line in log_of(run).splitlines() if "training goes on" in line]
    assert warning.startswith("WARNING: ") and name in warning and "step-00000006" in warning


@pytest.mark.parametrize("save_async", [False, True])
def test_the_second_failure_in_a_row_ends_training(
    save_async: bool, ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": save_async}))
    full: Fault = {"do": errno.ENOSPC, "at": "byte", "byte": 9000, "call": 2, "calls": 9, "rank": 1}
    assert ranks.run(run, 2, [full]) == [10, 10], log_of(run)
    assert whole_steps(run) == [3] and steps(run)[-1] == 9
    error = json.loads(run.attempt(1).error(0).read_text())
    assert (
        error["exit"] == 10
        and "rank 1 could not write" in error["message"]
        and "No space left" in error["message"]
    )
    assert ranks.run(run, 2) == [0, 0]  # somebody made room
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]


def test_the_last_save_must_not_fail(ranks: Ranks, tmp_path: Path) -> None:
    """A run without its last checkpoint has not succeeded."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    assert ranks.run(run, 2, [{"do": errno.EIO, "at": "byte", "byte": 10, "call": 4}]) == [10, 10]
    assert whole_steps(run) == [3, 6, 9]
    assert ranks.run(run, 2) == [0, 0] and whole_steps(run) == [3, 6, 9, 12]


def test_a_write_that_takes_only_a_part_is_gone_on_with(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    assert ranks.run(run, 2, [{"do": "short", "at": "byte", "byte": 5000, "call": 1}]) == [0, 0]
    for folder in published_folders(reference.checkpoints):
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert (
            files
            == json.loads((run.checkpoints / folder.name / "manifest.json").read_text())["files"]
        )
    assert whole_steps(run) == whole_steps(reference) == [3, 6, 9, 12]


def test_saves_behind_training_write_the_same_bytes(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9, "save_async": True}))
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    assert facts(run) == facts(reference)
    for folder in published_folders(reference.checkpoints):
        other = run.checkpoints / folder.name
        assert sorted(p.name for p in other.iterdir()) == sorted(p.name for p in folder.iterdir())
        assert all(
            (other / p.name).read_bytes() == p.read_bytes()
            for p in folder.iterdir()
            if p.suffix == ".bin"
        )
        mine, theirs = (json.loads((f / "manifest.json").read_text()) for f in (other, folder))
        for document in (mine, theirs):
            # which says whether it is behind training, and the hash of that
            del document["job"], document["xxh128"]
        assert mine == theirs


def test_no_room_is_known_before_anything_is_written(ranks: Ranks, tmp_path: Path) -> None:
    run = new_run(job_of("1", tmp_path, train_iters=3))
    codes = ranks.run(run, 1, [{"do": "full", "at": "room"}])
    assert (
        codes == [10]
        and "needs 0.000 GB, and" in log_of(run).replace("needs 0.001", "needs 0.000")
        and "GB free" in log_of(run)
    )
    assert whole_steps(run) == []


def test_a_full_disk_keeps_the_metrics_in_memory(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    """Half a line, then nothing, then all of it: every row is there once."""
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    assert ranks.run(run, 2, [{"at": "metrics", "calls": [3, 4, 5]}]) == [0, 0], log_of(run)
    assert facts(run) == facts(reference)
    assert log_of(run).count("its rows wait in memory") == 1


def test_the_clock_may_jump(ranks: Ranks, tmp_path: Path, reference: RunFolder) -> None:
    run = new_run(job_of("DP2", tmp_path, keep={"keep_last": 9}))
    jumps: list[dict[str, Any]] = [
        {"at": "clock", "seconds": -86_400.0, "rank": 0},
        {"at": "clock", "seconds": 1e9, "rank": 1},
    ]
    assert ranks.run(run, 2, jumps) == [0, 0], log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]
