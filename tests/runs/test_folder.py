"""Run folders: their ids sort by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.runs.folder import RunFolder, new_run_folder


def test_ids_sort_by_time_within_a_second_too(tmp_path: Path) -> None:
    """`last` is the newest by its id."""
    ids = [new_run_folder(tmp_path, "demo").path.name for _ in range(5)]
    assert ids == sorted(ids) and len(set(ids)) == 5


def test_a_taken_id_is_not_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter(["0001", "0001", "0002", *(f"{number:04x}" for number in range(3, 99))])
    monkeypatch.setattr("trainkit.runs.folder.secrets.token_hex", lambda size: next(random))
    first, second = new_run_folder(tmp_path, "demo"), new_run_folder(tmp_path, "demo")
    assert first.path.name < second.path.name and second.path.is_dir()


def test_where_everything_lies(tmp_path: Path) -> None:
    """Names that other versions, and people, look for."""
    run = RunFolder(tmp_path / "runs" / "job" / "20260101-000000-aaaa")
    assert (run.root, run.job_name, run.id) == (tmp_path, "job", "20260101-000000-aaaa")
    attempt = run.attempt(2)
    names = {
        "job.json": run.job,
        "plan.json": run.plan,
        "origin.json": run.origin,
        "origin.diff": run.diff,
        "engine.diff": run.engine_diff,
        "launch/hosts.json": run.hosts,
        "launch/inputs.json": run.inputs,
        "launch/world.json": run.world,
        "launch/supervisor.json": run.supervisor,
        "launch/maker.json": run.maker,
        "launch/slurm.json": run.slurm,
        "launch/attempt-2": run.session(2),
        "code": run.code,
        "metrics.jsonl": run.metrics,
        "tensorboard": run.tensorboard,
        "checkpoints": run.checkpoints,
        "attempts/2/events.jsonl": attempt.events,
        "attempts/2/launch": attempt.transports,
        "attempts/2/logs/3.log": attempt.log(3),
        "attempts/2/errors/3.json": attempt.error(3),
        "attempts/2/heartbeat/3.json": attempt.heartbeat(3),
    }
    assert {name: run.path / name for name in names} == names
