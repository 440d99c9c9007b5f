"""`checkpoints` and `replay` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.trained import MODEL, new_run, text_job, write_checkpoint
from trainkit.base.errors import TrainkitError
from trainkit.runs.checkpoints import published_folders, set_aside, step_of
from trainkit.runs.retention import pin
from trainkit.runs.sample_windows import SLOTS, SampleWindow, SampleWindowLog, find_sample_window
from trainkit.train.model.transformer import Transformer


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_checkpoints_and_replay(project: Project) -> None:
    sets = [
        "--set=checkpoint.keep_last=1",
        "--set=checkpoint.keep_best=1",
        "--set=training.eval_interval=5",
        "--set=checkpoint.keep_every=10",
    ]
    project.invoke("train", "text", *sets)
    (run,) = project.runs()
    checkpoints_are_listed_and_verified(project, run)
    steps_are_replayed(project, run)


def checkpoints_are_listed_and_verified(project: Project, run: Path) -> None:
    document = project.document("checkpoints", "last", "--verify", "--pin=10")
    assert document["schema"] == "checkpoints/1" and document["run"] == run.name
    losses = {row["step"]: row["validation"]["valid"] for row in document["checkpoints"]}
    measured = {row["step"]: row["lm_loss"] for row in project.metrics(run) if "eval" in row}
    best = min((5, 10, 15, 20), key=lambda step: measured[step])
    assert set(losses) == {best, 10, 20} and all(losses[step] == measured[step] for step in losses)
    rows = {row["step"]: row for row in document["checkpoints"]}
    assert (
        rows[10]["kept"][0] == "every 10"
        and rows[10]["kept"][-1] == "pinned"
        and rows[20]["kept"][:2] == ["newest 1", "every 10"]
    )
    assert all(
        row["problems"] == [] and row["bytes"] > 0 and row["layout"]["world_size"] == 2
        for row in rows.values()
    )

    flip(run / "checkpoints/step-00000020/rank-00001.bin")
    assert "sizes match" in project.invoke("checkpoints", "last", "--unpin=10").stdout
    told = project.invoke("checkpoints", "last", "--verify").stdout
    assert "rank-00001.bin does not have the hash" in told and "pinned" not in told
    missing = project.invoke("checkpoints", "last", "--pin=11", exit=16).stderr
    assert "no checkpoint of step 11" in missing and "10" in missing
    assert (
        "no checkpoint of step 0"
        in project.invoke("checkpoints", "last", "--pin=0", exit=16).stderr
    )
    set_aside(run / "checkpoints/step-00000010")
    losses.pop(10)
    last = project.document("checkpoints", "last")["checkpoints"][-1]
    assert last["step"] == 10 and "set aside as step-00000010." in last["problems"][0]
    for step in losses:
        flip(run / f"checkpoints/step-{step:08d}/rank-00000.bin")
    project.invoke("checkpoints", "last", "--verify", exit=16)


def steps_are_replayed(project: Project, run: Path) -> None:
    replayed = project.document("replay", "last", "--step=7", "--samples=0")
    assert (replayed["first"], replayed["count"], replayed["same"], len(replayed["samples"])) == (
        48,
        8,
        True,
        8,
    )
    assert [(s["data_rank"], s["micro_batch"]) for s in replayed["samples"]] == [(0, 0)] * 2 + [
        (1, 0)
    ] * 2 + [(0, 1)] * 2 + [(1, 1)] * 2
    assert any("the quick brown" in s["text"] for s in replayed["samples"])
    said = project.invoke("replay", "last", "--step=7", "--samples=1").stdout
    assert (
        "the step was computed from these samples" in said
        and "7 more" in said
        and replayed["samples"][0]["text"] in said
    )
    project.invoke("replay", "last", "--step=21", exit=3)
    lines = (
        (run / "metrics.jsonl")
        .read_text()
        .replace(f'"batch_checksum": {replayed["batch_checksum"]}', '"batch_checksum": 1')
    )
    (run / "metrics.jsonl").write_text(lines)
    said = project.invoke("replay", "last", "--step=7", exit=6).stdout
    assert "was NOT computed from these" in said


def test_the_ring_keeps_the_last_steps(tmp_path: Path) -> None:
    run = new_run(text_job(tmp_path))
    assert find_sample_window(run, 3) is None
    windows = SampleWindowLog(run)
    for step in (3, 4, 3 + SLOTS):
        windows.note(SampleWindow(step, 10 * step, 10))
    windows.note(SampleWindow(4, 100, 12))  # after a rollback, with other samples
    windows.close()
    assert (
        find_sample_window(run, 3 + SLOTS) == (3 + SLOTS, 10 * (3 + SLOTS), 10)
        and find_sample_window(run, 4) == (4, 100, 12)
        and find_sample_window(run, 0) is None
    )
    run.metrics.write_text(
        json.dumps({"step": 3, "consumed_samples": 30, "global_batch_size": 8}) + "\n"
    )
    assert find_sample_window(run, 3) == (3, 22, 8)


def test_pins(tmp_path: Path) -> None:
    run = new_run(text_job(tmp_path))
    write_checkpoint(run, Transformer(MODEL, 301), 3)
    pin(run.checkpoints, 3, pinned=True)
    pin(run.checkpoints, 3, pinned=True)
    assert [step_of(folder) for folder in published_folders(run.checkpoints)] == [3]
    pin(run.checkpoints, 3, pinned=False)
    pin(run.checkpoints, 3, pinned=False)
    with pytest.raises(TrainkitError, match="no checkpoint of step 4"):
        pin(run.checkpoints, 4, pinned=False)
