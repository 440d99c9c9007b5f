"""A run folder and a checkpoint of an older version (`old`, written by revision 59153fb) are read
and resumed as before.

It is a run of two ranks, 12 steps and a checkpoint every 2, whose rank 1 was killed in step 6 or
while that step was saved: the checkpoint of step 4 is whole, and the metrics reach step 6.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.runs.checkpoints import newest_valid, open_verified, verify
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.runs.record import read_run_record, read_supervisor_status
from trainkit.runs.sample_windows import find_sample_window
from trainkit.runs.summary import summarize_run

WRITTEN_AS = "20261122-153836-75df"
# of this process: by its name a run ends what is left of it, and other suites run it too
ID = f"20261122-153836-{os.getpid() % 2**16:04x}"
OLD = Path(__file__).parent / "old" / WRITTEN_AS
WRITTEN_AT = "/srv/project"


@pytest.fixture
def old_run(project: Project) -> RunFolder:
    """A copy of the old run in a project of its own, with that project's paths."""
    run = RunFolder(project.path / "runs" / "tiny" / ID)
    shutil.copytree(OLD, run.path)
    for path in run.path.rglob("*"):
        if path.suffix in (".json", ".jsonl") and "checkpoints" not in path.parts:
            text = path.read_text().replace(WRITTEN_AT, str(project.path))
            text = text.replace(WRITTEN_AS, ID)
            path.write_text(text.replace("/dev/shm", str(project.path / "node")))
    return run


def test_its_record_is_read(old_run: RunFolder) -> None:
    record = read_run_record(old_run)
    assert (record.state, record.failure_class, record.exit) == ("failed", "infra", 10)
    assert (record.step, record.attempt, record.lost) == (6, 1, False)
    assert record.root_cause is not None
    assert record.root_cause["rank"] == 1
    assert record.root_cause["signal"] == "SIGKILL"
    status = read_supervisor_status(old_run)
    assert status is not None
    assert (status.ended, status.host, status.attempt) == (True, "vm", 1)


def test_its_numbers_are_read(old_run: RunFolder) -> None:
    rows = read_rows(old_run.metrics)
    assert [row["step"] for row in rows if "eval" not in row] == [1, 2, 3, 4, 5, 6]
    summary = summarize_run(old_run)
    assert summary.training_loss() == pytest.approx((4.165418, 4.207085), abs=1e-5)
    assert summary.evaluations()[0]["lm_loss"] == pytest.approx(4.166013, abs=1e-5)
    window = find_sample_window(old_run, 5)
    assert window is not None
    assert (window.step, window.first, window.samples) == (5, 16, 4)


def test_its_checkpoint_is_read(old_run: RunFolder) -> None:
    (folder,) = old_run.checkpoints.iterdir()
    assert verify(folder) == []
    checkpoint = open_verified(folder)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.consumed_samples, len(manifest.files)) == (4, 16, 2)
    assert manifest.job["name"] == "tiny"
    assert manifest.validation["valid"] == pytest.approx(4.178750, abs=1e-5)
    assert {"model.embed_tokens.weight", "optimizer.exp_avg.final_norm.weight"} <= set(
        manifest.tensors
    )
    assert newest_valid(old_run.checkpoints, pytest.fail) == checkpoint


def test_tasks_read_it(project: Project, old_run: RunFolder) -> None:
    (row,) = project.document("runs")["runs"]
    assert (row["run"], row["state"], row["step"]) == (ID, "failed", 6)
    assert project.document("status", ID)["class"] == "infra"
    why = project.invoke("why", ID).stdout
    assert "rank 1" in why and "SIGKILL" in why
    report = project.document("report", ID)
    assert report["validation_loss"]["last"] == pytest.approx(4.178750, abs=1e-5)
    (checkpoint,) = project.document("checkpoints", ID)["checkpoints"]
    assert (checkpoint["step"], checkpoint["problems"]) == (4, [])


def test_it_is_resumed_from_its_checkpoint(project: Project, old_run: RunFolder) -> None:
    """By this version's code: its own is not among the fixture's files."""
    before = read_rows(old_run.metrics)
    resumed = project.document("resume", ID, "--code", "current")
    assert (resumed["state"], resumed["attempt"], resumed["step"]) == ("succeeded", 2, 12)
    rows = read_rows(old_run.metrics)
    assert [row["step"] for row in rows if "eval" not in row] == list(range(1, 13))
    # steps 5 and 6 were made by the old version already: another processor may round differently
    steps = {row["step"]: row["lm_loss"] for row in rows if "eval" not in row}
    for row in before:
        if "eval" not in row:
            assert steps[row["step"]] == pytest.approx(row["lm_loss"], rel=1e-4)
