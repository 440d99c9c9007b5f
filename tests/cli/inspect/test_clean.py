"""`clean`: what it would delete, what it deletes, and what it never touches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOBS, TASKS, Project
from tests.runs.test_record import begin
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import remove
from trainkit.base.locks import locked
from trainkit.cli.inspect.checkpoints import clean
from trainkit.cli.run import train as runner
from trainkit.cli.wrapper import TaskContext
from trainkit.experiment.options import ResumeOptions
from trainkit.runs import retention
from trainkit.runs.checkpoints import verify
from trainkit.runs.folder import RunFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one ended run that has checkpoints of steps 1, 2, 3 and 4; that of step 1
    is pinned."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tasks.py").write_text(TASKS)
    (folder / "jobs.toml").write_text(
        JOBS.replace("[clusters.here]", f'[clusters.here]\nnode_folder = "{folder}/node"')
    )
    sets = (
        "checkpoint.keep_last=9",
        "training.train_iters=4",
        "training.save_interval=1",
        "training.eval_iters=0",
        "cluster.ranks_per_node=1",
    )
    project = Project(folder)
    project.invoke(
        "train", "random", *(word for value in sets for word in ("--set", value)), timeout=1200
    )
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
    return sorted(
        int(path.name[5:])
        for path in (run / "checkpoints").glob("step-*")
        if path.name[5:].isdigit()
    )


def cleaned(
    project: Project,
    run: str = "",
    keep: int = 1,
    *,
    damaged: bool = False,
    perform: bool = False,
    dry: bool = False,
) -> dict[str, Any]:
    """The document of `clean`, in this process; its page is printed."""
    task = TaskContext(json=False, dry_run=dry, folder=project.path)
    answer = clean(task, run, keep, damaged=damaged, perform=perform)
    task.show(answer.page)
    return answer.document


def names(told: dict[str, Any]) -> list[str]:
    return sorted(Path(each["path"]).name for each in told["leftovers"])


def test_it_keeps_the_newest_and_what_is_pinned(
    kept: tuple[Project, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = kept
    (run / "checkpoints" / "step-00000009.0badcafe.tmp").mkdir()
    aside = run / "checkpoints" / "step-00000003.0badcafe.damaged"
    aside.mkdir()
    for told in (
        project.document("clean"),
        cleaned(project, perform=True, dry=True),
        cleaned(project, "random"),
    ):
        assert (told["schema"], told["deleted"]) == ("clean/1", False) and told["bytes"] > 10_000
        assert names(told) == ["step-00000002", "step-00000003", "step-00000009.0badcafe.tmp"]
        assert steps(run) == [1, 2, 3, 4] and aside.is_dir()
    assert names(cleaned(project, keep=3)) == ["step-00000009.0badcafe.tmp"]
    # the newest is damaged: nothing goes
    part = max(
        (
            path
            for path in (run / "checkpoints/step-00000004").iterdir()
            if path.name != "manifest.json"
        ),
        key=lambda path: path.stat().st_size,
    )
    content = part.read_bytes()
    part.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert cleaned(project, perform=True)["leftovers"] == [] and steps(run) == [1, 2, 3, 4]
    assert "its newest checkpoint is damaged" in capsys.readouterr().out
    part.write_bytes(content)
    assert cleaned(project, perform=True)["deleted"] and "deleted: " in capsys.readouterr().out
    assert steps(run) == [1, 4] and aside.is_dir() and not list((run / "checkpoints").glob("*.tmp"))
    assert names(cleaned(project, perform=True, damaged=True)) == [aside.name]
    assert steps(run) == [1, 4] and not aside.exists()
    assert (
        cleaned(project, perform=True)["leftovers"] == []
        and verify(run / "checkpoints" / "step-00000004") == []
    )


def test_a_run_of_another_version_holds_up_no_other(
    kept: tuple[Project, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = kept
    other = run.with_name("20200101-000000-0000")
    shutil.copytree(run, other, symlinks=True)
    job = json.loads((other / "job.json").read_text())
    job["job"]["training"]["lr"] = "of another version"
    (other / "job.json").write_text(json.dumps(job))
    assert names(cleaned(project, perform=True)) == ["step-00000002", "step-00000003"]
    assert f"run {other.name}: nothing is deleted: " in capsys.readouterr().out
    assert (steps(run), steps(other)) == ([1, 4], [1, 2, 3, 4])
    with pytest.raises(ConfigError, match=r"training\.lr"):
        cleaned(project, other.name, perform=True)


def test_a_folder_that_cannot_be_deleted_holds_up_no_other(
    kept: tuple[Project, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go, and the exit code says that not all went."""
    project, run = kept
    other = run.with_name("20200101-000000-0000")
    shutil.copytree(run, other, symlinks=True)

    def refusing(folder: Path) -> None:
        if folder.is_relative_to(other):
            raise PermissionError(f"not yours: {folder}")
        remove(folder)

    monkeypatch.setattr(retention, "remove", refusing)
    task = TaskContext(json=False, dry_run=False, folder=project.path)
    answer = clean(task, "", 1, damaged=False, perform=True)
    assert answer.exit == Exit.STAGE_FAILED
    assert names(answer.document) == ["step-00000002", "step-00000003"] and steps(run) == [1, 4]
    assert f"run {other.name}: not all is deleted: not yours" in capsys.readouterr().out


def test_a_run_that_goes_on_is_left_alone(
    kept: tuple[Project, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And one whose folder somebody writes to: a checkpoint that is being published must not go."""
    project, run = kept
    with locked(run / "checkpoints" / "writer.lock", {"host": "here"}, wait=False):
        assert (
            cleaned(project, perform=True)["leftovers"] == []
            and "is being written to" in capsys.readouterr().out
        )
    (run / "launch" / "supervisor.json").unlink()
    begin(RunFolder(run), 2)  # this process is its supervisor, and lives
    assert (
        cleaned(project, perform=True)["leftovers"] == []
        and "is running: nothing is deleted" in capsys.readouterr().out
    )
    assert steps(run) == [1, 2, 3, 4]


def test_resume_says_what_it_would_begin_with(
    kept: tuple[Project, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = kept

    def said() -> str:
        runner.resume(
            TaskContext(json=False, dry_run=True, folder=project.path),
            "last",
            ResumeOptions(set=["training.train_iters=6"]),
        )
        return capsys.readouterr().out

    assert "from the checkpoint of step 4" in said()
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    out = said()
    assert "would be passed over" in out and "from the checkpoint of step 3" in out
    for step in (1, 2, 3):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(TrainkitError, match="none of the 4 checkpoints") as refused:
        said()
    assert refused.value.exit == 16
    shutil.rmtree(run / "checkpoints")
    assert "from step 0: it has no checkpoint" in said()
