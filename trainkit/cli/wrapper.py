"""One wrapper makes every Invoke task: `--json`, `--dry-run`, errors, exit codes and Ctrl-C
behave the same everywhere.

Imports neither pydantic nor torch nor rich: `invoke --list` must be quick.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke.context import Context
from invoke.exceptions import Exit as InvokeExit
from invoke.tasks import Task

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import keep_others_from_writing, who_denies

if TYPE_CHECKING:
    from rich.console import Console

COMMON_HELP = {
    "json": "print one JSON document on stdout, prose on stderr",
    "dry-run": "change nothing, print exactly what would be done",
}


@dataclass(frozen=True)
class TaskContext:
    """How a task speaks: what it was asked for, and where its words go. `folder` is that of
    tasks.py."""

    json: bool
    dry_run: bool
    folder: Path

    @property
    def command(self) -> str:
        """How the person runs tasks here."""
        return command_in(self.folder)

    @functools.cached_property
    def console(self) -> Console:
        """For prose and tables: stdout, or stderr under `--json`."""
        from rich.console import Console

        from trainkit.cli.tables import NO_LIMIT

        if self.json:
            stream = sys.stderr
        else:
            stream = sys.stdout
        return Console(
            stderr=self.json,
            highlight=False,
            soft_wrap=True,
            width=None if stream.isatty() else NO_LIMIT,
        )

    def say(self, text: str = "") -> None:
        """One line of plain prose."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)


def command_in(folder: Path) -> str:
    """How the person runs tasks: by the wrapper of the checkout `folder` with its own .venv, by
    `trainkit`, or by `invoke`."""
    if Path(sys.prefix) == folder.resolve() / ".venv" and (folder / "inv").is_file():
        return "./inv"
    program = Path(sys.argv[0])
    if "trainkit" in (program.name, program.parent.name):
        return "trainkit"
    return "invoke"


@dataclass(frozen=True)
class TaskResult:
    """What a task's function returns: the document of `--json`, and the exit code."""

    document: dict[str, Any]
    exit: Exit = Exit.DONE


Body = Callable[..., TaskResult | None]


def make_task(
    *,
    positional: Iterable[str] = (),
    iterable: Iterable[str] = (),
    help: dict[str, str] | None = None,
    takes_json: bool = False,
    takes_dry_run: bool = False,
    minimum: Mapping[str, float] | None = None,
) -> Callable[[Body], Task[Any]]:
    """Turn a function of a TaskContext and options into an Invoke task.

    Args:
        positional: parameters that are required arguments.
        iterable: parameters that may be given several times.
        help: a line for each parameter, by its flag's name.
        takes_json: the task takes `--json`.
        takes_dry_run: the task takes `--dry-run`, and `invoke --dry` means the same.
        minimum: the lowest value of a number.
    """

    def decorate(body: Body) -> Task[Any]:
        own = list(inspect.signature(body).parameters.values())[1:]
        words = [p.name for p in own]
        extra = [n for n, wanted in (("json", takes_json), ("dry_run", takes_dry_run)) if wanted]

        @functools.wraps(body)
        def run(context: Context, **values: Any) -> None:
            dry_run = bool(values.pop("dry_run", False)) or (
                takes_dry_run and bool(context.config.run.dry)
            )
            # Invoke keeps the folder of the tasks.py it found only here
            folder = Path(context.config._project_prefix or os.curdir).absolute()
            task = TaskContext(json=bool(values.pop("json", False)), dry_run=dry_run, folder=folder)
            _refuse_flag_words(body, {n: values[n] for n in positional})
            given = _numbers({n: values[n] for n in words}, own, minimum or {})
            _call(task, lambda: body(task, **given))

        run.__doc__ = _unwrapped(inspect.getdoc(body) or "")
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter("context", keyword),
            *map(_as_word, own),
            *(inspect.Parameter(n, keyword, default=False) for n in extra),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Invoke reads
        texts = {
            **{n.replace("_", "-"): COMMON_HELP[n.replace("_", "-")] for n in extra},
            **(help or {}),
        }
        return Task(
            run,
            positional=list(positional),
            iterable=list(iterable),
            help=texts,
            auto_shortflags=False,
        )

    return decorate


def _unwrapped(text: str) -> str:
    """Each paragraph as one line: Invoke shows the first line as a task's summary."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _refuse_flag_words(body: Body, words: dict[str, str]) -> None:
    """Invoke takes `train --help` as "train the job called --help"."""
    for name, word in words.items():
        if word.startswith("-"):
            verb = body.__name__.replace("_", "-")
            raise InvokeExit(
                f"error: {verb} needs a {name.upper()} before {word!r}\n  for its help: invoke"
                f" --help {verb}",
                code=Exit.USAGE,
            )


def _as_word(parameter: inspect.Parameter) -> inspect.Parameter:
    """A number flag as Invoke is shown it: a word."""
    if _is_optional_count(parameter):
        return parameter.replace(default="")
    if type(parameter.default) in (int, float):
        return parameter.replace(default=str(parameter.default))
    return parameter


def _is_optional_count(parameter: inspect.Parameter) -> bool:
    """A whole number that may be left out, and then is None: 0 is a step like any other. (A
    module's annotations are text.)"""
    return parameter.default is None and parameter.annotation == "int | None"


def _numbers(
    values: dict[str, Any], parameters: Iterable[inspect.Parameter], minimum: Mapping[str, float]
) -> dict[str, Any]:
    """Words of number flags as numbers: Invoke's own conversion ends in a traceback."""
    found = dict(values)
    for parameter in parameters:
        kind = type(parameter.default)
        word = values[parameter.name]
        flag = f"--{parameter.name.replace('_', '-')}"
        if _is_optional_count(parameter):
            if word == "":
                found[parameter.name] = None
                continue
            kind = int
        if kind not in (int, float):
            continue
        try:
            found[parameter.name] = number = kind(word)
        except ValueError:
            raise InvokeExit(
                f"error: {flag} takes a {'whole ' if kind is int else ''}number, not {word!r}",
                code=Exit.USAGE,
            ) from None
        if isinstance(number, float) and not math.isfinite(number):
            raise InvokeExit(f"error: {flag} takes a finite number, not {word!r}", code=Exit.USAGE)
        if number >= 2**63:
            raise InvokeExit(
                f"error: {flag} {word} is too large: it must be below 2**63", code=Exit.USAGE
            )
        if number < minimum.get(parameter.name, number):
            raise InvokeExit(
                f"error: {flag} {word}: the lowest is {minimum[parameter.name]}", code=Exit.USAGE
            )
    return found


def _say_error(
    task: TaskContext, message: str, exit: Exit, problems: list[dict[str, object]] | None = None
) -> InvokeExit:
    """The exception that ends the task with this message; under `--json` the document is printed
    as well."""
    if task.json:
        plain = [{"message": message, "hint": "", "file": None, "line": None}]
        print(json.dumps({"schema": "error/1", "exit": int(exit), "problems": problems or plain}))
    return InvokeExit(message, code=int(exit))


def _as_typed(task: TaskContext, text: str) -> str:
    """Advice such as `invoke why RUN`, with the program that the person runs in place of invoke."""
    return re.sub(r"\binvoke (?=[a-z])", f"{task.command} ", text)


def _install_and_begin_again(task: TaskContext, error: MissingExtra) -> None:
    """In the checkout's own .venv, which `./inv` keeps: install the extra and run the same
    command again. Returns where that is not for us to do."""
    if task.command != "./inv" or task.dry_run:
        return
    from trainkit.base.install import InstallError, ensure, has_extra

    root = task.folder.resolve()
    # and its package is missing all the same: a second time would not help
    if has_extra(root, error.extra):
        return
    print(
        f"{error.list[0].message}: installing the extra {error.extra}", file=sys.stderr, flush=True
    )
    try:
        ensure(root, [error.extra])
    except InstallError as failed:
        raise _say_error(task, f"error: {error}\n{failed}", Exit.STAGE_FAILED) from None
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _denied(error: PermissionError) -> TrainkitError:
    """The error for a file that this person may not touch; whose it is tells why, where it is
    another's."""
    stops, owner = who_denies(Path(os.fsdecode(error.filename)))
    message = f"{error.strerror}: {error.filename}"
    if not owner:
        return TrainkitError(message, exit=Exit.STAGE_FAILED)
    hint = (
        f"{stops} belongs to {owner}; clusters.NAME.root is one person's folder, or a group's that"
        " may write all of it: "
    )
    return TrainkitError(
        message,
        exit=Exit.STAGE_FAILED,
        hint=hint + 'root = "FOLDER/${host:USER}" gives each their own',
    )


def _call(task: TaskContext, body: Callable[[], TaskResult | None]) -> None:
    keep_others_from_writing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that is not UTF-8 still gets all that it can show
            stream.reconfigure(errors="backslashreplace")
    try:
        answer = body()
    except MissingExtra as error:
        _install_and_begin_again(task, error)
        raise _say_error(task, f"error: {error}", error.exit, error.problems()) from None
    except TrainkitError as error:
        raise _say_error(
            task, _as_typed(task, f"error: {error}"), error.exit, error.problems()
        ) from None
    except KeyboardInterrupt:
        raise _say_error(task, "interrupted; what was finished is kept", Exit.INTERRUPTED) from None
    except BrokenPipeError:
        # the reader has gone: `invoke runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InvokeExit(code=128 + signal.SIGPIPE) from None
    except OSError as error:
        if isinstance(error, PermissionError) and isinstance(error.filename, str | bytes):
            denied = _denied(error)
            raise _say_error(task, f"error: {denied}", denied.exit, denied.problems()) from None
        if error.filename:
            where = f": {error.filename}"
        else:
            where = ""
        raise _say_error(
            task, f"error: {error.strerror or error}{where}", Exit.STAGE_FAILED
        ) from None
    except InvokeExit:
        raise
    except Exception:
        traceback.print_exc()
        raise _say_error(
            task,
            "error: this is a bug in trainkit; please report it with the lines above",
            Exit.BUG,
        ) from None
    if answer is None:
        return
    if task.json:
        print(json.dumps(answer.document))
    if answer.exit:
        raise InvokeExit(code=int(answer.exit))
