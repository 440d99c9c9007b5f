"""A dry run of a published job shows what would start, where its data are not there too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TASKS, Project

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def published(tmp_path: Path) -> Project:
    """The published jobs in a folder of their own."""
    (tmp_path / "jobs").symlink_to(CHECKOUT / "jobs")
    (tmp_path / "jobs.toml").write_text('include = ["jobs/*.toml"]\n')
    (tmp_path / "tasks.py").write_text(TASKS)
    return Project(tmp_path)


def test_what_would_start_is_shown_before_what_is_missing(published: Project) -> None:
    said = published.invoke("train", "jean-zay-7-5b", "--dry-run", exit=6)
    assert "meg-gpt2_text_document.idx" in said.stderr
    assert "would submit: sbatch" in said.stdout
    assert "pretrain_gpt.py --num-layers 36 --hidden-size 4096" in said.stdout
    assert "--checkpoint-activations" in said.stdout
    assert not list(published.path.glob("runs/*"))


def test_what_cannot_start_is_said_at_once(published: Project) -> None:
    said = published.invoke("train", "jean-zay-76b", "--dry-run", exit=3)
    assert "should be divisible" in said.stderr
    assert "would" not in said.stdout
