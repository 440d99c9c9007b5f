"""`clean`: what it would delete, what it deletes, and what it never touches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import JOBS, TASKS, Project
from tests.runs.test_record import begin
from trainkit.base.locks import locked
from trainkit.runs.folder import RunFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one ended run that has checkpoints of steps 1, 2, 3 and 4; that of step 1 is pinned."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tasks.py").write_text(TASKS)
    (folder / "jobs.toml").write_text(JOBS.replace("[clusters.here]", f'[clusters.here]\nnode_folder = "{folder}/node"'))
    sets = ("checkpoint.keep_last=9", "training.train_iters=4", "training.save_interval=1", "training.eval_iters=0", "cluster.ranks_per_node=1")
    project = Project(folder)
    project.invoke("train", "random", *(word for value in sets for word in ("--set", value)), timeout=1200)
    project.invoke("checkpoints", "last", "--pin", "1")
    return folder


@pytest.fixture
def kept(trained: Path, tmp_path: Path) -> tuple[Project, Path]:
    """A copy of it, for one test: the project, and the run's folder."""
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    project = Project(tmp_path / "copy")
    (run,) = project.runs()
    assert steps(run) == [1, 2, 3, 4]
    return project, run


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())


def test_it_keeps_the_newest_and_what_is_pinned(kept: tuple[Project, Path]) -> None:
    project, run = kept
    (run / "checkpoints" / "step-00000009.0badcafe.tmp").mkdir()
    aside = run / "checkpoints" / "step-00000003.0badcafe.damaged"
    aside.mkdir()
    for words in (["clean"], ["clean", "--perform", "--dry-run"], ["clean", "--run", "random"]):
        told = project.document(*words)
        assert (told["schema"], told["deleted"]) == ("clean/1", False) and told["bytes"] > 10_000
        assert sorted(Path(each["path"]).name for each in told["leftovers"]) == ["step-00000002", "step-00000003", "step-00000009.0badcafe.tmp"]
        assert steps(run) == [1, 2, 3, 4] and aside.is_dir()
    assert [Path(each["path"]).name for each in project.document("clean", "--keep", "3")["leftovers"]] == ["step-00000009.0badcafe.tmp"]
    # the newest is damaged: nothing goes
    part = max((path for path in (run / "checkpoints/step-00000004").iterdir() if path.name != "manifest.json"), key=lambda path: path.stat().st_size)
    content = part.read_bytes()
    part.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "cannot be relied on" in project.invoke("clean", "--perform").stdout and steps(run) == [1, 2, 3, 4]
    part.write_bytes(content)
    assert "deleted: " in project.invoke("clean", "--perform").stdout
    assert steps(run) == [1, 4] and aside.is_dir() and not list((run / "checkpoints").glob("*.tmp"))
    project.invoke("clean", "--perform", "--damaged")
    assert steps(run) == [1, 4] and not aside.exists()
    assert "nothing is left over" in project.invoke("clean", "--perform").stdout
    project.invoke("checkpoints", "last", "--verify")


def test_a_run_that_goes_on_is_left_alone(kept: tuple[Project, Path]) -> None:
    """And one whose folder somebody writes to: a checkpoint that is being published must not go."""
    project, run = kept
    with locked(run / "checkpoints" / "writer.lock", {"host": "here"}, wait=False):
        assert "is being written to" in project.invoke("clean", "--perform").stdout
    (run / "launch" / "supervisor.json").unlink()
    begin(RunFolder(run), 2)  # this process is its supervisor, and lives
    assert "is running: nothing of it goes" in project.invoke("clean", "--perform").stdout
    assert steps(run) == [1, 2, 3, 4]


def test_resume_says_what_it_would_begin_with(kept: tuple[Project, Path]) -> None:
    project, run = kept
    words = ("resume", "last", "--dry-run", "--set", "training.train_iters=6")
    assert "from the checkpoint of step 4" in project.invoke(*words).stdout
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    out = project.invoke(*words).stdout
    assert "would be passed over" in out and "from the checkpoint of step 3" in out
    for step in (1, 2, 3):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    assert "none of the 4 checkpoints" in project.invoke(*words, exit=16).stderr
    shutil.rmtree(run / "checkpoints")
    assert "from step 0: it has no checkpoint" in project.invoke(*words).stdout
