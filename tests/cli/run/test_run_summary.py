"""What a person is told at the end of a run, and before one that could not report where it is
asked to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import Project
from tests.runs.test_record import begin, end
from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import write_json
from trainkit.cli.inspect.report import ReportFiles, report
from trainkit.cli.run import stages as prepare, train as runner
from trainkit.cli.run.summary import facts_table
from trainkit.cli.wrapper import TaskContext
from trainkit.engines.convert.formats import READ_FORMATS
from trainkit.engines.registry import PLACES
from trainkit.experiment.options import ResumeOptions, TrainOptions
from trainkit.experiment.prepare import PrepareOptions
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.summary import summarize_run
from trainkit.train.inference.load import choose_checkpoint


def new_run(project: Project, job: str, *rows: dict[str, Any]) -> RunFolder:
    """A run that ended well, with these rows."""
    run = RunFolder(project.path / "runs" / job / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    write_job(run.job, load(project.path).resolve(job))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    end(begin(run), 0, "success")
    return run


def step(number: int, skipped: int = 0, nan: int = 0) -> dict[str, Any]:
    counts = {"skipped_iterations": skipped, "nan_iterations": nan}
    return {
        "step": number,
        "lm_loss": 3.0,
        "elapsed_ms": 1.0,
        "tokens_per_second": 9.0,
        "consumed_samples": 8 * number,
        **counts,
    }


def valid(number: int, name: str, loss: float) -> dict[str, Any]:
    return {"step": number, "consumed_samples": 8 * number, "eval": name, "lm_loss": loss}


def printed(run: RunFolder) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(facts_table(run))
    return capture.get()


def test_skipped_steps_and_further_validation_sets_are_shown(project: Project) -> None:
    rows = (
        valid(0, "valid", 5.0),
        valid(0, "books", 6.0),
        step(1, 2, 1),
        step(2, 1),
        valid(2, "valid", 4.0),
        valid(2, "books", 4.5),
    )
    run = new_run(project, "text", *rows)
    lines = [" ".join(line.split()) for line in printed(run).splitlines()]
    assert (
        "validation loss 5.0000 before, 4.0000 after" in lines
        and "validation loss on books 6.0000 before, 4.5000 after" in lines
    )
    assert "skipped steps 3, 1 of them for a loss or gradient norm that is not finite" in lines
    report = summarize_run(run).to_json()
    assert report["further_validation_losses"] == {"books": {"first": 6.0, "last": 4.5}} and report[
        "validation_loss"
    ] == {"first": 5.0, "last": 4.0}
    assert (report["skipped_iterations"], report["nan_iterations"]) == (3, 1)


def test_nothing_is_said_of_what_was_not(project: Project) -> None:
    run = new_run(project, "text", step(1), step(2))
    assert "skipped" not in printed(run) and "validation" not in printed(run)
    assert summarize_run(run).to_json()["further_validation_losses"] == {}
    run.metrics.write_text(json.dumps(step(1, skipped=1)) + "\n")
    assert "skipped steps 1" in [" ".join(line.split()) for line in printed(run).splitlines()]


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (4.5, ["9 tokens/s, 2.00 times the plan's 4"]),
        (18.0, ["9 tokens/s, 0.50 times the plan's 18"]),
        (None, []),
    ],
)
def test_the_speed_is_so_many_times_the_plans(
    planned: float | None, said: list[str], project: Project
) -> None:
    run = new_run(project, "random", step(1), step(2))
    duration = planned and {"speed": {"tokens_per_second": planned}}
    write_json(run.plan, document("plan/1", duration=duration))
    task = TaskContext(json=False, dry_run=False, folder=project.path)
    lines = report(task, run.id, ReportFiles(), "").page
    assert [line for line in lines if isinstance(line, str) and "plan" in line] == said


def test_only_a_model_of_text_is_asked_to_write(project: Project) -> None:
    text, random = (
        read_run_record(new_run(project, job)).next_tasks() for job in ("text", "random")
    )
    assert [task.split()[1] for task in text] == ["generate", "report", "tensorboard"]
    assert [task.split()[1] for task in random] == ["report", "tensorboard"]


@pytest.mark.parametrize("engine", sorted(PLACES.keys() - {"native"}))
def test_another_engines_run_is_to_be_converted_first(project: Project, engine: str) -> None:
    run = new_run(project, "text", step(8))
    found = json.loads(run.job.read_text())
    found["job"]["engine"] = engine
    run.job.write_text(json.dumps(found))
    (task, *_) = read_run_record(run).next_tasks()
    converts = engine in READ_FORMATS
    assert task.startswith("invoke convert" if converts else "invoke report")
    with pytest.raises(ConfigError, match=f"trained by {engine}") as refused:
        choose_checkpoint(run)
    assert ("invoke convert" in str(refused.value)) == converts


def test_a_damaged_job_is_named(project: Project) -> None:
    run = new_run(project, "text", step(8))
    run.job.write_text("")
    with pytest.raises(ConfigError, match=r"job\.json is not JSON"):
        read_run_record(run).next_tasks()


def test_a_longer_run_is_told_where_its_decay_ends(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(project, "random", step(30))
    (run.path / "launch").mkdir()
    (run.path / "launch" / "inputs.json").write_text('{"schema": "inputs/1", "files": []}')
    task = TaskContext(json=False, dry_run=True, folder=project.path)
    runner.resume(task, "last", ResumeOptions(set=["training.train_iters=50"]))
    assert (
        "after step 30 the learning rate is min_lr = 0; --set training.lr_decay_iters=50 would"
        in capsys.readouterr().out
    )
    runner.resume(
        task, "last", ResumeOptions(set=["training.train_iters=50", "training.lr_decay_iters=50"])
    )
    assert "min_lr" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "extra", "old", "new"),
    [
        ("ftfy", "data", 'source = "files"', 'source = "files"\nfix_text = true'),
        ("trafilatura", "curate", "corpus/*.jsonl", "corpus"),
    ],
)
def test_an_extra_of_the_data_is_missed_before_a_worker_starts(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    extra: str,
    old: str,
    new: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    project.edit_jobs(old, new)
    (project.path / "corpus" / "part-2.warc.gz").touch()
    with pytest.raises(MissingExtra, match=f"{package}, which is not installed") as caught:
        prepare.prep_data(
            TaskContext(json=False, dry_run=False, folder=project.path),
            PrepareOptions("lines"),
        )
    assert (
        caught.value.extra == extra
        and caught.value.exit == 6
        and not list(project.path.glob("data/**/*.bin"))
    )
    # only says what would be run
    prepare.prep_data(
        TaskContext(json=False, dry_run=True, folder=project.path),
        PrepareOptions("lines", dry_run=True),
    )


@pytest.mark.parametrize("key", [False, True])
def test_weights_and_biases_is_missed_before_there_is_a_run(
    project: Project, monkeypatch: pytest.MonkeyPatch, key: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = project.path / "jobs.toml"
    path.write_text(path.read_text() + 'wandb = { project = "papers" }\n')
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "e5f0c2a94b7d")
        path.write_text(
            path.read_text().replace(
                "[clusters.here]", '[clusters.here]\nsecrets = ["WANDB_API_KEY"]'
            )
        )
    with pytest.raises(ConfigError, match="wandb is not installed") as caught:
        runner.train(
            TaskContext(json=False, dry_run=False, folder=project.path),
            "random",
            TrainOptions(),
        )
    assert len(caught.value.list) == (1 if key else 2) and not Path(project.path / "runs").exists()
