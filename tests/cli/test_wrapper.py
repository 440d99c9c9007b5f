"""What a task's function is told of how it was called."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from invoke.config import Config
from invoke.context import Context
from invoke.exceptions import Exit as InvokeExit
from rich.markup import escape

from trainkit.base.errors import ConfigError
from trainkit.cli.tables import Listing, marked
from trainkit.cli.wrapper import TaskContext, make_task

TASKS = """
from trainkit.cli.wrapper import make_task

@make_task()
def mine(task):
    import helper
"""


@pytest.mark.parametrize(
    ("takes", "typed", "of_invoke", "expected"),
    [
        (False, None, False, False),
        (False, None, True, False),
        (True, False, False, False),
        (True, True, False, True),
        (True, False, True, True),
    ],
)
def test_dry_runs(takes: bool, typed: bool | None, of_invoke: bool, expected: bool) -> None:
    """By the task's own --dry-run or by `invoke --dry`, where the task takes it; else never."""
    told: list[bool] = []

    def body(task: TaskContext) -> None:
        told.append(task.dry_run)

    words = {} if typed is None else {"dry_run": typed}
    make_task(takes_dry_run=takes)(body)(
        Context(Config(overrides={"run": {"dry": of_invoke}})), **words
    )
    assert told == [expected]


@pytest.mark.parametrize("unwanted", [False, True])
def test_what_a_task_imports_is_compiled_once(tmp_path: Path, unwanted: bool) -> None:
    """Invoke turns bytecode off: every command would compile what was installed without."""
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "tasks.py").write_text(TASKS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if unwanted:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    subprocess.run(
        [sys.executable, "-m", "invoke", "mine"], cwd=tmp_path, env=environment, check=True
    )
    assert Path(cache_from_source(str(tmp_path / "helper.py"))).exists() != unwanted


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\r"


def test_text_of_others_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """Names, lines of data and messages of programs, by whichever way a task prints them."""

    def body(task: TaskContext) -> None:
        task.say(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        listing = Listing("NAME")
        listing.add_row(escape(HOSTILE))
        task.console.print(listing)
        task.console.print(escape(HOSTILE))
        listing.add_row("train.py:100: an error")
        task.console.print(listing, marked("train.py:100: an error"), "train.py:100: an error")
        raise ConfigError(HOSTILE, hint=HOSTILE)

    with pytest.raises(InvokeExit) as ended:
        make_task()(body)(Context(Config()))
    printed = capsys.readouterr()
    everything = printed.out + printed.err + str(ended.value.message)
    assert everything.count("\\x1b]0;owned") == 7
    assert everything.count("train.py:100: an error") == 3, "no picture in its place"
    assert everything.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["checkout", "a checkout"])
def test_inv_is_named_as_a_shell_finds_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkout itself and from elsewhere."""
    folder = tmp_path / name
    (folder / ".venv").mkdir(parents=True)
    (folder / "inv").touch()
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    task = TaskContext(json=False, dry_run=False, folder=folder)
    monkeypatch.chdir(folder)
    assert task.command == "./inv"
    for elsewhere in (tmp_path, folder / ".venv"):
        monkeypatch.chdir(elsewhere)
        assert shlex.split(task.command) == [str(folder / "inv")]
