"""Runs beside each other: where losses part, and what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import Project
from tests.reports.test_page import HOSTILE, row
from trainkit.reports.compare import ABSENT, compare_runs, comparison_page
from trainkit.reports.read import RunReport, read_report
from trainkit.runs.folder import RunFolder


def make(root: Path, name: str, losses: list[float | None], **settings: Any) -> RunFolder:
    run = RunFolder(root / "runs" / "job" / name)
    run.path.mkdir(parents=True)
    origins = {key: {"value": value, "place": "jobs.toml:1"} for key, value in settings.items()}
    run.job.write_text(json.dumps({"schema": "job/1", "job": {}, "origins": origins}))
    packages = {"torch": "2.13.0", name: HOSTILE}
    origin = {"schema": "origin/1", "git_commit": "abc", "packages": packages}
    run.origin.write_text(json.dumps(origin))
    run.metrics.write_text("".join(row(s, lm_loss=loss) for s, loss in enumerate(losses, 1)))
    return run


def reports(*runs: RunFolder) -> list[RunReport]:
    return [read_report(run) for run in runs]


def test_where_losses_part(tmp_path: Path) -> None:
    noisy = [4.0 + (0.1 if step % 2 else -0.1) - step / 100 for step in range(40)]
    last_bit = [*noisy[:10], noisy[10] + 1e-15, *noisy[11:]]
    far = [*noisy[:20], *(loss + 2.0 for loss in noisy[20:])]
    broken: list[float | None] = [*noisy[:30], None, *noisy[31:]]
    first = make(tmp_path, "a", [*noisy])
    others = [
        make(tmp_path, "b", [*noisy[:7]]),
        make(tmp_path, "c", [*last_bit]),
        make(tmp_path, "d", [*far]),
        make(tmp_path, "e", broken),
        make(tmp_path, "f", []),
    ]
    found = compare_runs(reports(first, *others)).losses
    assert [(each.common, each.bitwise, each.beyond_noise) for each in found] == [
        (7, None, None),
        (40, 11, None),
        (40, 21, 21),
        (40, 31, 31),
        (0, None, None),
    ]


def test_what_differs(tmp_path: Path) -> None:
    one = make(tmp_path, "a", [1.0], **{"training.lr": 0.1, "model.vocab_size": 128, "same": 1})
    two = make(tmp_path, "b", [1.0], **{"training.lr": 0.2, "model.vocab_size": 64, "same": 1})
    found = compare_runs(reports(one, two))
    configuration = {each.key: list(each.values) for each in found.configuration}
    assert configuration == {"training.lr": ["0.1", "0.2"], "model.vocab_size": ["128", "64"]}
    assert {each.key: list(each.values) for each in found.software} == {
        "a": [HOSTILE, ABSENT],
        "b": [ABSENT, HOSTILE],
    }
    assert "cannot be compared" in found.notes[0]
    page = comparison_page(found)
    assert HOSTILE not in page and "cannot be compared" in page


def test_the_task(project: Project) -> None:
    make(project.path, "a1", [3.0, 2.0])
    make(project.path, "b1", [3.0, 2.5], **{"training.lr": 0.2})
    make(project.path, "c1", [3.0, 2.0])
    words = ["compare", "a1", "b1", "--also", "c1", "--html", "c.html"]
    value = json.loads(project.invoke(*words, "--json").stdout)
    assert value["schema"] == "comparison/1"
    assert [each["run"] for each in value["runs"]] == ["a1", "b1", "c1"]
    assert [each["bitwise"] for each in value["losses"]] == [2, None]
    assert (project.path / "c.html").read_text().startswith("<!doctype html>")
    said = project.invoke("compare", "a1", "b1").stdout
    assert "training.lr" in said and "b1: losses differ from step 2" in said
    assert "is not two runs" in project.invoke("compare", "a1", "a1", exit=3).stderr
