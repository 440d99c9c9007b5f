"""The guide to checkpoints: its job resolves, its keys, tasks and flags exist, and the numbers
in it are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import Project
from trainkit.base.errors import Exit
from trainkit.jobs.load import load
from trainkit.jobs.schema import CheckpointSettings, Training
from trainkit.runs.checkpoints import LOCK, SAMPLED, UNFINISHED_SUFFIX
from trainkit.runs.sample_windows import SLOTS
from trainkit.train.checkpoint.manager import MAX_FAILURES
from trainkit.train.main import LEAVE_SECONDS

TEXT = (Path(__file__).resolve().parent.parent / "docs/checkpoints.md").read_text()
BASE = (
    "[clusters.here]\n[models.demo]\nnum_layers = 1\nhidden_size = 32\nnum_attention_heads ="
    " 2\nseq_length = 16\nvocab_size = 512\n"
)


def test_its_job(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "jobs.toml").write_text(BASE + block)
    keep = load(tmp_path, {}).resolve("long").job.checkpoint
    assert (keep.keep_last, keep.keep_every, keep.keep_best, keep.verify, keep.save_async) == (
        2,
        500,
        1,
        "full",
        True,
    )


def test_every_key_in_backquotes_exists() -> None:
    known = {*CheckpointSettings.model_fields, *Training.model_fields, "save_seconds"}
    words = set(re.findall(r"`(?:training\.)?([a-z]+_[a-z_]+)`", TEXT))
    assert len(words) >= 3 and words <= known, words - known


def test_its_numbers() -> None:
    assert (
        f"one file in {SAMPLED}" in TEXT
        and f"the last {SLOTS:,} steps" in TEXT
        and f"checkpoints/{LOCK}" in TEXT
        and f"`{UNFINISHED_SUFFIX}`" in TEXT
    )
    assert (
        MAX_FAILURES == 2
        and "The second failure in a row" in TEXT
        and LEAVE_SECONDS == 2.0
        and "two seconds later" in TEXT
    )
    assert (Exit.RANK_INFRA, Exit.PREEMPTED, Exit.NO_CHECKPOINT, Exit.HOSTS_BUSY) == (
        10,
        12,
        16,
        17,
    )


def test_its_tasks(project: Project) -> None:
    used = re.findall(r"^ {4}invoke ([a-z-]+)(.*)$", TEXT, re.MULTILINE)
    assert {task for task, _ in used} == {"checkpoints", "replay"}
    for task in {task for task, _ in used}:
        described = project.invoke("--help", task).stdout
        flags = {
            flag
            for name, words in used
            if name == task
            for flag in re.findall(r"--[a-z-]+", words.partition("#")[0])
        }
        assert all(flag in described for flag in flags), (task, flags)
