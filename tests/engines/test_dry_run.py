"""A dry run of a published job shows what would start, where its data are not there too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TASKS, Project

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def published(tmp_path: Path) -> Project:
    """The published jobs in a folder of their own."""
    for name in ("jobs", "container"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
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


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("nemo-gpt3-126m", "--config-name=nemo-gpt3-126m_hydra.yaml"),
        ("neuron-gpt3-23b", "my-gpt2_text_document]' "),
    ],
)
def test_pairs_that_are_still_to_be_fetched_have_their_places(
    published: Project, job: str, words: str
) -> None:
    said = published.invoke(
        "train",
        job,
        "--dry-run",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_MAX_ATTEMPTS="1",
        AWS_ACCESS_KEY_ID="nobody",
        AWS_SECRET_ACCESS_KEY="nothing",
    )
    assert words in said.stdout
    assert "my-gpt" in said.stdout[said.stdout.index("not looked at: ") :]


def test_what_cannot_start_is_said_at_once(published: Project) -> None:
    said = published.invoke("train", "jean-zay-76b", "--dry-run", exit=3)
    assert "should be divisible" in said.stderr
    assert "would" not in said.stdout
