"""The Python API: `import trainkit` is cheap, and its functions do what the tasks do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainkit
from tests import forkserver
from tests.conftest import Project
from trainkit.base.errors import ConfigError, TrainkitError

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "python-api.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def test_import_is_cheap() -> None:
    """Neither torch nor pydantic nor any room of the package comes with it."""
    code = (
        "import sys; before = set(sys.modules); import trainkit; dir(trainkit);"
        " print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert [name for name in imported if name.startswith("trainkit")] == ["trainkit"]
    assert not {"torch", "pydantic", "rich", "numpy"} & set(imported)


def test_names_of_the_api_hide_no_package() -> None:
    package = Path(trainkit.__file__).parent
    for name in trainkit._API:
        assert getattr(trainkit, name).__name__ == name
        assert not (package / name).exists() and not (package / f"{name}.py").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(trainkit, "nothing")  # noqa: B009


def python(project: Project, code: str) -> str:
    """What a program prints that a person runs in the project's folder."""
    program = project.path / "guide.py"
    program.write_text(code)
    done = forkserver.run(
        [sys.executable, str(program)],
        cwd=project.path,
        env=project.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out: str = done.stdout
    return out


def test_the_guide_plans_and_reports_errors(project: Project) -> None:
    plans, _, _, errors = BLOCKS
    names, plan = python(project, plans).splitlines()
    assert names == "['text', 'random']" and plan.startswith("True 2 ranks,")
    assert python(project, errors) == "3\n"


def test_the_guide_runs_two_ranks_and_reads_their_metrics(project: Project) -> None:
    out = python(project, BLOCKS[1]).splitlines()
    assert out[-2:] == ["succeeded at step 4", "4 training steps"]
    assert any(line.startswith("4 ") for line in out)
    (run,) = trainkit.all_runs(project=project.path)
    assert run.status().state == "succeeded" and run.job.world_size == 2
    assert run.id == trainkit.find_run("random", project=project.path).id
    assert [row["step"] for row in run.metrics() if "eval" not in row] == [1, 2, 3, 4]
    with pytest.raises(TrainkitError, match="has finished"):
        run.resume(project=project.path)


def test_the_guide_goes_on(project: Project) -> None:
    assert python(project, BLOCKS[2]).splitlines() == ["succeeded", "4"]


def test_a_run_is_cancelled(project: Project) -> None:
    options = trainkit.TrainOptions(set=["training.train_iters=100000"])
    run = trainkit.run("random", project=project.path, options=options)
    lines = list[str]()
    cancelled = run.cancel(say=lines.append)
    assert cancelled.record.state == "cancelled" and run.status().state == "cancelled"
    assert cancelled.hosts is not None and not any(host.left for host in cancelled.hosts)
    assert any("asked to stop" in line for line in lines)
    assert run.follow().state == "cancelled"


def test_prepare(project: Project) -> None:
    jobs = trainkit.load(project.path)
    lines = list[str]()
    found = trainkit.prepare("text", project=jobs, say=lines.append)
    assert any(verdict.stage == "prep-data" and not verdict.fresh for verdict in found)
    assert any("prep-data" in line and "is stale because" in line for line in lines)
    again = trainkit.prepare(dataset="lines", project=jobs)
    assert all(verdict.fresh for verdict in again)


def test_options_that_contradict_each_other(project: Project) -> None:
    options = trainkit.TrainOptions(foreground=True)
    with pytest.raises(ConfigError, match="contradict each other"):
        trainkit.run("random", project=project.path, options=options)
