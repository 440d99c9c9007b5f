"""The task `drill`: a run that is hurt on purpose, and jobs of which no drill is made."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Project
from trainkit.rehearse.harm import FAULTS, NOT_MADE
from trainkit.runs.checkpoints import set_aside_in


def test_it_says_what_it_would_do(project: Project) -> None:
    said = project.invoke("drill", "random", "--dry-run")
    assert all(fault.words in said.stdout for fault in FAULTS)
    assert all(f"{name}: {why}" in said.stdout for name, why in NOT_MADE.items())
    assert not project.runs()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("training.save_interval = 5\n", "", "saves only at its end"),
        ('cluster = "here"', 'engine = "megatron-lm"\ncluster = "here"', "has engine megatron-lm"),
        ("ranks_per_node = 2", 'launcher = "slurm"\nranks_per_node = 2', "has launcher slurm"),
    ],
)
def test_jobs_of_which_no_drill_is_made(project: Project, old: str, new: str, words: str) -> None:
    project.edit_jobs(old, new)
    assert words in project.invoke("drill", "random", exit=3).stderr
    assert not project.runs()


@pytest.mark.slow
def test_a_run_goes_on_after_each_fault(project: Project) -> None:
    """All that is made on one machine; the job's own record and the score card agree."""
    project.edit_jobs("[clusters.here]", "[clusters.here]\nwatch = { heartbeat = 20, grace = 1 }")
    value = project.document("drill", "random", "--html", "drill.html")
    made = [score for score in value["faults"] if score["made"]]
    assert [score["fault"] for score in made] == [f.name for f in FAULTS if not f.of_copies]
    assert all(score["good"] and score["equal"] for score in made) and not value["left"]
    ended = [score for score in made if score["attempt"]]
    assert [score["attempt"] for score in ended] == list(range(1, len(ended) + 1))
    assert all(score["detected"] < score["recovered"] for score in ended)
    assert "What faults cost" in (project.path / "drill.html").read_text()
    hurt, alone = project.runs()
    assert (hurt.name, alone.name) == (value["run"], value["reference"])
    assert hurt.parent.name == "random-drill"
    assert set_aside_in(hurt / "checkpoints"), "the checkpoint that was spoilt is still believed"
    events = (hurt / "attempts/1/events.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in events if '"rank_ended"' in line]
    assert any(event["code"] == -9 for event in last)


def test_a_run_that_ends_before_it_is_hurt_is_no_drill(project: Project) -> None:
    project.invoke("train", "random", "--set", "training.train_iters=100000", "--detach")
    (first,) = project.runs()
    try:
        refused = project.invoke("drill", "random", exit=17).stderr
        assert "ended before it was hurt" in refused and first.name in refused
        assert len(project.runs()) == 2
    finally:
        project.invoke("cancel", first.name, exit=15)
