"""[[jobs.X.evaluations]]: names become datasets, paths absolute, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from tests.jobs.test_blends import FILES
from trainkit.jobs.resolved import read_job, write_job

JOB = """
[jobs.base]
extends = "demo"
dataset = "web"
training.save_interval = 50
"""
TWO = """
[[jobs.base.evaluations]]
name = "held-out"
every = 100
datasets = ["code", "web"]

[[jobs.base.evaluations]]
name = "quiz"
tasks = ["arc_easy"]
include_path = "tasks"
"""


def table(text: str) -> str:
    return f'{GOOD}{FILES}{JOB}\n[[jobs.base.evaluations]]\nname = "a"\n{text}\n'


def test_names_become_datasets(checkout: Checkout, tmp_path: Path) -> None:
    resolved = checkout(GOOD + FILES + JOB + TWO).resolve("base", ["evaluations.0.limit=3"])
    held_out, quiz = resolved.job.evaluations
    assert [dataset.name for dataset in held_out.datasets] == ["code", "web"]
    assert held_out.datasets[1] == resolved.job.dataset and held_out.limit == 3
    assert [each.name for each in resolved.job.prepared_datasets] == ["web", "code"]
    assert [each.name for each in resolved.job.datasets] == ["web"], "what its ranks read"
    assert quiz.include_path == str(resolved.job.cluster.root_folder / "tasks")
    assert "evaluations.0.datasets.0.paths" in resolved.origins
    write_job(tmp_path / "job.json", resolved)
    assert read_job(tmp_path / "job.json") == resolved.job
    due = [step for step in range(0, 251, 50) if held_out.is_due(step, 250)]
    assert due == [100, 200, 250] and quiz.is_due(250, 250) and not quiz.is_due(100, 250)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("every = 75\ntasks = ['x']", "evaluations.0.every = 75: an evaluation reads a saved"),
        ("every = 100", "evaluation 'a' needs datasets or tasks, one of the two"),
        ("tasks = ['x']\ndatasets = ['code']", "needs datasets or tasks, one of the two"),
        ("datasets = ['cod']", "names no [datasets.X] table"),
        ("datasets = ['mock']", "dataset 'mock' is random tokens: no text"),
        ("datasets = ['code']\nbatch_size = 4", "batch_size is of tasks"),
        ("tasks = ['x']\n[[jobs.base.evaluations]]\nname = 'a'\ntasks = ['y']", "rename one"),
    ],
)
def test_what_is_refused(text: str, words: str, checkout: Checkout) -> None:
    said = refused(checkout(table(text)), "base")
    assert any(words in problem for problem in said), said


def test_of_which_jobs(checkout: Checkout) -> None:
    """Random tokens have no text, and other engines no checkpoints of ours; a step that is not
    saved is refused where nothing is saved before the end, too."""
    jobs = checkout(table("tasks = ['x']\nevery = 10").replace("training.save_interval = 50", ""))
    assert "saves one at the end alone" in str(refused(jobs, "base"))
    assert "need text, and dataset 'mock' is random" in str(refused(jobs, "base", ["dataset=mock"]))
    said = refused(jobs, "base", ["engine=nemo"])
    assert "evaluations are engine native's, not 'nemo''s" in str(said)
