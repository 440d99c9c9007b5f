"""What is missing is installed from the checkout or by its own name: never the package that has
trainkit's name on the index, which is somebody else's."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from invoke.exceptions import Exit as InvokeExit

from trainkit.base import extras, install as installer
from trainkit.base.extras import DISTRIBUTION, MissingExtra, install_command
from trainkit.cli import wrapper
from trainkit.cli.wrapper import TaskContext

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "constraints.txt",
    ROOT / "inv",
    ROOT / "jobs.toml",
    ROOT / "setup.py",
    ROOT / "pyproject.toml",
]
FOREIGN = re.compile(r"""pip[0-9.]*\s+(install|download)\b[^\n`]*?[\s'"]trainkit(?![\w./-])""")


def test_no_text_names_the_foreign_package() -> None:
    files = [
        *TEXTS,
        *(
            p
            for part in ("trainkit", "docs", "jobs", "container", "benchmarks")
            for p in (ROOT / part).rglob("*")
            if p.suffix in READABLE
        ),
    ]
    assert len(files) > 150
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        if path.is_file()
        for match in FOREIGN.finditer(path.read_text())
    ]
    allowed = "trainkit/base/extras.py: pip install trainkit"  # says not to
    assert found == [allowed]


READABLE = (".py", ".md", ".toml", ".sh", ".txt", ".in", ".json")


@pytest.mark.parametrize(
    "text",
    [
        "pip install trainkit",
        "pip install 'trainkit[data]'",
        "pip3 install --force-reinstall trainkit",
        'pip install "trainkit[report]"',
    ],
)
def test_the_pattern_knows_it(text: str) -> None:
    assert FOREIGN.search(f"hint: {text}, or leave it out")


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e '.[data]'",
        "pip install trainkit-lm",
        "pip install -e '/home/me/trainkit[data]'",
        "pip install /home/me/trainkit",
    ],
)
def test_and_lets_the_checkout_be(text: str) -> None:
    assert not FOREIGN.search(text)


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "trainkit" and project["scripts"] == {
        "trainkit": "trainkit.cli.program:main"
    }
    needed = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    assert {"gigatoken", "pyarrow"} <= needed, "jobs/data.toml asks for them"


def test_the_command_names_interpreter_and_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shlex.split(install_command("report")) == [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-e",
        f"{ROOT}[report]",
    ]
    assert shlex.split(install_command())[-1] == str(ROOT)
    # a node's snapshot of the code: packages are named one by one
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    lines = ["numpy>=2.0", 'matplotlib>=3.9; extra == "report"', "ftfy>=6.2 ; extra == 'data'"]
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: lines if name == DISTRIBUTION else None
    )
    assert shlex.split(install_command("report"))[3:] == ["install", "matplotlib>=3.9"]
    assert shlex.split(install_command("data"))[4:] == ["ftfy>=6.2"] and shlex.split(
        install_command()
    )[4:] == ["numpy>=2.0"]
    error = MissingExtra("drawing needs matplotlib", "report", otherwise="or leave it")
    assert str(error) == f"drawing needs matplotlib\n  {install_command('report')}\n  or leave it"


def test_inv_installs_an_extra_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: where the extra is installed and its package is missing all the same, the error is
    the answer. Elsewhere than in ./inv's own .venv too."""
    (tmp_path / "inv").touch()
    task, installed, begun = (
        TaskContext(json=False, dry_run=False, folder=tmp_path),
        list[list[str]](),
        list[list[str]](),
    )
    monkeypatch.setattr(installer, "ensure", lambda root, wanted: installed.append(wanted))
    monkeypatch.setattr(installer, "has_extra", lambda root, extra: [extra] in installed)
    monkeypatch.setattr("os.execv", lambda path, argv: begun.append(argv))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-P", "-m", "trainkit", "report", "last"])

    def draws() -> None:
        raise MissingExtra("drawing needs matplotlib", "report")

    def refused(asked: TaskContext) -> str:
        with pytest.raises(InvokeExit) as leave:
            wrapper._run_task(asked, draws)
        assert leave.value.code == 3
        return str(leave.value.message)

    # another environment: only the command is said
    assert install_command("report") in refused(task) and not installed
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    refused(TaskContext(json=False, dry_run=True, folder=tmp_path))
    assert not installed, "a dry run changes nothing"
    refused(task)
    assert installed == [["report"]] and begun == [
        [sys.executable, "-P", "-m", "trainkit", "report", "last"]
    ]
    assert "drawing needs matplotlib: installing the extra report" in capfd.readouterr().err
    refused(task)
    assert len(installed) == len(begun) == 1
