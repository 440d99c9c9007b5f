"""One wrapper makes every Invoke task: `--json`, `--dry-run`, errors, exit codes and Ctrl-C
behave the same everywhere.

Imports neither pydantic nor torch nor rich: `invoke --list` must be quick.
"""

from __future__ import annotations

import functools
import gc
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke.context import Context
from invoke.exceptions import Exit as InvokeExit
from invoke.tasks import Task

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import blocking_owner, restrict_umask
from trainkit.base.interrupts import keep_interrupts
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.printable import OutputClosed, printable, printable_output
from trainkit.cli.parameters import Signature, signature_of

if TYPE_CHECKING:
    from rich.console import Console

    from trainkit.cli.tables import Page

JSON_HELP = "print one JSON document on stdout, and all other text on stderr"
DRY_RUN_HELP = "change nothing; print what would be done"


@dataclass(frozen=True)
class TaskContext:
    """How a task was called, and where it prints.

    Args:
        json: print one JSON document on stdout, and everything else on stderr.
        dry_run: change nothing.
        folder: that of tasks.py.
    """

    json: bool
    dry_run: bool
    folder: Path

    @property
    def command(self) -> str:
        """The command that runs tasks here, such as "invoke"."""
        return command_in(self.folder)

    @functools.cached_property
    def console(self) -> Console:
        """For text and tables: stdout, or stderr with `--json`."""
        from trainkit.cli.tables import Printer

        return Printer(stderr=self.json)

    def say(self, text: str = "") -> None:
        """Print one line of text, without markup."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def show(self, page: Page) -> None:
        """Print the parts of a page, one after the other."""
        for part in page:
            if isinstance(part, str):
                self.say(part)
            else:
                self.console.print(part)


def _has_own_environment(folder: Path) -> bool:
    """Whether this is the .venv of a checkout, which its `inv` manages."""
    return Path(sys.prefix) == folder.resolve() / ".venv" and (folder / "inv").is_file()


def command_in(folder: Path) -> str:
    """The command that was used to run tasks, as a shell finds it from here: "./inv" of a checkout
    with its own .venv, "trainkit" or "inv", by their paths where PATH does not lead to them, or
    "invoke"."""
    if _has_own_environment(folder):
        return "./inv" if Path.cwd() == folder.resolve() else shlex.quote(str(folder / "inv"))
    program = Path(sys.argv[0])
    if program.name == "__main__.py" and program.parent.name == "trainkit":  # python -m trainkit
        return "trainkit"
    if program.name not in ("trainkit", "inv"):
        return "invoke"
    found = shutil.which(program.name)
    if found and Path(found).resolve() == program.resolve():
        return program.name
    return shlex.quote(sys.argv[0])


@dataclass(frozen=True)
class TaskResult:
    """What a task's function returns.

    Args:
        document: what `--json` prints.
        exit: the exit code.
        page: what is printed without `--json`, after all that the task has said: lines as they
            are, and tables and other things for rich. Nothing of it is made with `--json`.
    """

    document: dict[str, Any]
    exit: Exit = Exit.DONE
    page: Page = ()


Body = Callable[..., TaskResult | None]


def make_task(
    *,
    options: type | None = None,
    help: Mapping[str, str] | None = None,
    takes_json: bool = False,
    takes_dry_run: bool = False,
    minimum: Mapping[str, float] | None = None,
    name: str = "",
) -> Callable[[Body], Task[Any]]:
    """Turn a function of a TaskContext, arguments and options into an Invoke task. Its parameters
    without default are arguments of the command line, the others are options.

    Args:
        options: a subclass of `experiment.options.Options`; the function's parameter `options` is
            an instance of it.
        help: a line for each of the function's other parameters, by its flag without dashes.
        takes_json: the task takes `--json`.
        takes_dry_run: the task takes `--dry-run`, and `invoke --dry` means the same.
        minimum: the lowest value of a number.
        name: of the task, where a function of Python cannot have it.
    """

    def decorate(body: Body) -> Task[Any]:
        signature = signature_of(body, options, help=help or {}, minimum=minimum or {})

        @functools.wraps(body)
        def run(context: Context, **values: object) -> None:
            dry_run = bool(values.get("dry_run")) or (
                takes_dry_run and bool(context.config.run.dry)
            )
            # Invoke keeps the folder of the tasks.py it found only here
            folder = Path(context.config._project_prefix or os.curdir).absolute()
            task = TaskContext(json=bool(values.get("json")), dry_run=dry_run, folder=folder)

            def called() -> TaskResult | None:
                _refuse_flags_as_arguments(body, signature, values)
                return body(task, **signature.arguments(values))

            _run_task(task, called)

        run.__name__ = name or run.__name__
        run.__doc__ = _unwrapped(inspect.getdoc(body) or "")
        common = {}
        if takes_json:
            common["json"] = JSON_HELP
        if takes_dry_run:
            common["dry_run"] = DRY_RUN_HELP
        return _invoke_task(run, signature, common)

    return decorate


class _SharedTask(Task[Any]):
    """A task that no command changes: Invoke copies all tasks in depth before it looks for one."""

    def __deepcopy__(self, memo: object) -> _SharedTask:
        return self


def _invoke_task(
    run: Callable[..., None], signature: Signature, common: Mapping[str, str]
) -> Task[Any]:
    """A task as Invoke sees it.

    Args:
        run: takes Invoke's context and all parameters by name.
        signature: what the task takes.
        common: {name: help} of further flags.
    """
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter("context", keyword),
        *(each.for_invoke() for each in signature.all),
        *(inspect.Parameter(name, keyword, default=False) for name in common),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Invoke reads it
    texts = {each.name: each.help for each in signature.all if each.help} | dict(common)
    return _SharedTask(
        run,
        positional=[each.name for each in signature.all if each.required],
        iterable=[each.name for each in signature.all if each.repeated],
        help={name.replace("_", "-"): text for name, text in texts.items()},
        auto_shortflags=False,
    )


def _unwrapped(text: str) -> str:
    """Each paragraph as one line: Invoke shows the first line as a task's summary."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _refuse_flags_as_arguments(
    body: Body, signature: Signature, values: Mapping[str, object]
) -> None:
    """Invoke takes `train --help` as "train the job called --help"."""
    for parameter in signature.own:
        given = str(values.get(parameter.name))
        if parameter.required and given.startswith("-"):
            verb = body.__name__.rstrip("_").replace("_", "-")
            raise TrainkitError(
                f"{verb} needs a {parameter.name.upper()} before {given!r}",
                exit=Exit.USAGE,
                hint=f"for its help: invoke --help {verb}",
            )


def print_document(document: Mapping[str, object]) -> None:
    """Print what `--json` promises. Raises OutputClosed."""
    try:
        print(json.dumps(document), flush=True)
    except BrokenPipeError:
        raise OutputClosed from None


def _ending(
    task: TaskContext, message: str, exit: Exit, problems: list[dict[str, object]] | None = None
) -> InvokeExit:
    """The exception that ends the task with this message. With `--json` the document error/1 is
    printed as well."""
    if task.json:
        plain = [{"message": message, "hint": "", "file": None, "line": None}]
        print_document({"schema": "error/1", "exit": int(exit), "problems": problems or plain})
    return InvokeExit(printable(message), code=int(exit))


def end_without_reader() -> InvokeExit:
    """The exception that ends a program whose output nobody reads, as SIGPIPE would end it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return InvokeExit(code=128 + signal.SIGPIPE)


def _with_command(task: TaskContext, text: str) -> str:
    """Advice such as `invoke why RUN`, with the command that is used here instead of invoke."""
    return re.sub(r"\binvoke (?=[a-z]|--help)", f"{task.command} ", text)


def _install_and_restart(task: TaskContext, error: MissingExtra) -> None:
    """In a checkout's own .venv, which `./inv` manages: install the extra and run the same command
    again. Returns in any other environment."""
    if not _has_own_environment(task.folder) or task.dry_run:
        return
    from trainkit.base.install import InstallError, ensure, has_extra

    root = task.folder.resolve()
    # the extra is installed and its package is missing: a second time would not help
    if has_extra(root, error.extra):
        return
    print(
        f"{error.list[0].message}: installing the extra {error.extra}", file=sys.stderr, flush=True
    )
    try:
        ensure(root, [error.extra])
    except InstallError as failed:
        raise _ending(task, f"error: {error}\n{failed}", Exit.STAGE_FAILED) from None
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _error_of_system(error: OSError) -> TrainkitError:
    """An error of the operating system as one of ours. For a file that belongs to another person
    it says whose it is."""
    reason = error.strerror or str(error)
    if not error.filename:
        return TrainkitError(reason, exit=Exit.STAGE_FAILED)
    message = f"{reason}: {error.filename}"
    hint = ""
    if isinstance(error, PermissionError) and isinstance(error.filename, str | bytes):
        denied, owner = blocking_owner(Path(os.fsdecode(error.filename)))
        if owner:
            hint = (
                f"{denied} belongs to {owner}; clusters.NAME.root must be your own folder, or one"
                ' that its group may write: root = "FOLDER/${host:USER}" gives each person their'
                " own"
            )
    return TrainkitError(message, exit=Exit.STAGE_FAILED, hint=hint)


def _run_task(task: TaskContext, body: Callable[[], TaskResult | None]) -> None:
    """Run a task's function, print its document, and turn every error into a message and an exit
    code. Raises InvokeExit unless the exit code is 0."""
    restrict_umask()
    gc.set_threshold(100_000)  # looking for garbage among imports takes a tenth of their time
    # Invoke turned it off: every command would compile again what an installer left as source
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that is not UTF-8 still gets all that it can show
            stream.reconfigure(errors="backslashreplace")
    try:
        with printable_output(), keep_interrupts():
            result = body()
            if result is not None and not task.json:
                task.show(result.page)
        if result is not None and task.json:
            print_document(result.document)
    except MissingExtra as error:
        _install_and_restart(task, error)
        raise _ending(task, f"error: {error}", error.exit, error.problems()) from None
    except TrainkitError as error:
        message = _with_command(task, f"error: {error}")
        raise _ending(task, message, error.exit, error.problems()) from None
    except KeyboardInterrupt:
        raise _ending(task, "interrupted; what was finished is kept", Exit.INTERRUPTED) from None
    except OutputClosed:
        raise end_without_reader() from None
    except OSError as system_error:
        ours = _error_of_system(system_error)
        raise _ending(task, f"error: {ours}", ours.exit, ours.problems()) from None
    except InvokeExit as ended:
        raise InvokeExit(ended.message and printable(ended.message), code=ended.code) from None
    except Exception:
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        raise _ending(
            task,
            "error: this is a bug in trainkit; please report it with the lines above",
            Exit.BUG,
        ) from None
    if result is not None and result.exit:
        raise InvokeExit(code=int(result.exit))
