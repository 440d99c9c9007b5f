"""The demo itself, at its full size, on 1, 2 and 4 ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Project

ROOT = Path(__file__).resolve().parent.parent


def copy_jobs(project: Project) -> None:
    """This checkout's experiments, the files they include too."""
    shutil.copy(ROOT / "jobs.toml", project.path / "jobs.toml")
    shutil.copytree(ROOT / "jobs", project.path / "jobs")
    # slots of its own
    (project.path / "jobs.local.toml").write_text(
        f'[clusters.here]\nnode_folder = "{project.path}/node"\n'
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_same_samples_and_losses_on_1_2_and_4_ranks(project: Project) -> None:
    copy_jobs(project)
    for ranks in (1, 2, 4):
        project.invoke("train", "demo", "--set", f"cluster.ranks_per_node={ranks}", timeout=1200)
    one, two, four = map(project.metrics, project.runs())
    for a, b, c in zip(one, two, four, strict=True):
        assert a.get("batch_checksum") == b.get("batch_checksum") == c.get("batch_checksum")
        assert b["lm_loss"] == pytest.approx(a["lm_loss"], abs=1e-4) and c[
            "lm_loss"
        ] == pytest.approx(a["lm_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_megatrons_order(project: Project) -> None:
    """The demo in Megatron's order: the stage builds it, training learns as well, and every
    batch is another than in the native order."""
    copy_jobs(project)
    said = project.invoke("train", "demo", "--set", "sample_order=megatron", timeout=1200).stdout
    assert "index python-stdlib--stdlib-bpe is stale because" in said
    rows = project.metrics(project.runs()[-1])
    assert [row["lm_loss"] for row in rows if "eval" in row][-1] < 5.5
    assert len({row["batch_checksum"] for row in rows if "eval" not in row}) == 170
    again = project.invoke("prep-data", "--job", "demo", "--dry-run").stdout
    assert "index python-stdlib" not in again  # the job itself has the native order
