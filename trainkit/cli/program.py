"""The program `trainkit` (`./inv` runs it too): Invoke with the tasks built in, its own help page,
hints, and completion of names.

It understands everything that `invoke` understands. A tasks.py in the current folder or above is
used as `invoke` uses it; the tasks are there without one, too. Imports neither pydantic nor torch
nor rich.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from invoke.exceptions import CollectionNotFound, Exit as InvokeExit, ParseError
from invoke.parser.context import ParserContext
from invoke.program import Program
from invoke.terminals import pty_size

from trainkit.base.extras import DISTRIBUTION
from trainkit.base.printable import flush
from trainkit.cli.completion import SCRIPTS, TABLES, candidates, names_of
from trainkit.cli.wrapper import command_in, end_without_reader, print_document

GROUPS = {
    "Start": ("init", "import", "jobs", "show", "check", "plan", "scale", "coord-check", "graph"),
    "Prepare": (
        "build",
        "build-container",
        "prep-data",
        "precompile",
        "rehearse",
        "drill",
        "diff-engines",
        "data-stats",
        "data-verify",
        "data-why",
    ),
    "Run": ("train", "sweep", "resume", "attach", "cancel"),
    "Follow": (
        "runs",
        "status",
        "logs",
        "why",
        "checkpoints",
        "report",
        "compare",
        "scaling-law",
        "board",
        "tensorboard",
    ),
    "After training": ("generate", "evaluate", "average", "export", "convert", "replay", "clean"),
    "Hosts": ("nodes", "doctor", "setup-hosts", "fleet"),
    "This checkout": ("test", "bench", "docs"),
}
MAX_WIDTH = 100  # columns of a help page
UNKNOWN = "No idea what"  # how Invoke's message about an unknown token begins
WITHOUT_FLAG = {"test": "--path", "bench": "--name"}  # of a task's words that have none before them
WITHOUT_VALUE = re.compile(r"Flag <Argument: ([\w-]+)")  # and that about a flag at the end


class TrainkitProgram(Program):
    """Invoke's program with trainkit's tasks in it."""

    @property
    def command(self) -> str:
        """The command that was used to run it."""
        return command_in(self._folder)

    @property
    def _folder(self) -> Path:
        """That of tasks.py."""
        return Path(self.config._project_prefix or os.curdir)

    # -- loading the tasks

    def load_collection(self) -> None:
        """Load tasks.py, or trainkit's own tasks if there is none."""
        name = self.args.collection.value
        loader = self.loader_class(config=self.config, start=self.args["search-root"].value)  # type: ignore[call-arg]  # as Invoke itself
        try:
            found = loader.find(name or self.config.tasks.collection_name) is not None
        except CollectionNotFound:
            found = False
        if found or name:
            super().load_collection()
            return
        from trainkit.cli.tasks import namespace

        self.config.set_project_location(os.getcwd())
        self.config.load_project()
        self.collection = namespace

    def parse_collection(self) -> None:
        """As Invoke does, but load the tasks before `--help`, which shows them."""
        self.load_collection()
        self.list_root = None
        self.list_depth = None
        self.list_format = "flat"
        self.scoped_collection = self.collection

    # -- parsing the command line

    def parse_tasks(self) -> None:
        """As Invoke does, with hints for what is unknown, and with `train --help` for `--help
        train`. With `--json` what is wrong is a document too. Raises ParseError."""
        asked = "--json" in self.core.unparsed
        try:
            self._parse_tasks()
        except ParseError as error:
            if asked:
                message, _, hint = str(error).removeprefix("error: ").partition("\n  ")
                problem = {"message": message, "hint": hint, "file": None, "line": None}
                print_document({"schema": "error/1", "exit": 1, "problems": [problem]})
            raise

    def _parse_tasks(self) -> None:
        given = self.core.unparsed
        if len(given) > 1 and given[1] in ("--help", "-h"):
            self.args.help.value = given[0]
            self.core.unparsed = []
        elif given and (flag := WITHOUT_FLAG.get(given[0])):
            self.core.unparsed = _words_as_options(given, flag)
        try:
            super().parse_tasks()
        except ParseError as error:
            if error.context is not None and error.context.missing_positional_args:
                missing = " and a ".join(
                    str(argument.name).upper() for argument in error.context.missing_positional_args
                )
                task = str(error.context.name)
                raise ParseError(
                    f"error: {task} needs a {missing}\n  {self._usage(task)}", error.context
                ) from None
            if without := WITHOUT_VALUE.match(str(error)):
                flag = without[1].replace("_", "-")
                raise ParseError(f"error: --{flag} needs a value", error.context) from None
            if not str(error).startswith(UNKNOWN):
                raise
            raise ParseError(f"error: {self._explain(error)}", error.context) from None

    def _explain(self, error: ParseError) -> str:
        """What is wrong with the token that the parser stopped at, and the nearest known one."""
        token = str(error).removeprefix(f"{UNKNOWN} ").removesuffix(" is!").strip("'\"")
        context = error.context
        if token.startswith("-"):
            return self._explain_flag(token, context)
        nearest = _nearest(token, self.parser.contexts)
        if context is None or context.name is None:
            hint = nearest or f"{self.command} --help lists the tasks"
            return f"there is no task {token!r}\n  {hint}"
        task = str(context.name)
        if flags := _flags_for(token, context, self._folder):
            options = " or ".join(f"{self.command} {task} --{flag} {token}" for flag in flags)
            return f"{task} takes {token!r} only after a flag\n  did you mean {options}?"
        hint = nearest or self._usage(task)
        return f"{token!r} is neither an argument of {task} nor a task\n  {hint}"

    def _explain_flag(self, flag: str, context: ParserContext | None) -> str:
        command = self.command
        known: list[str] = list(context.flags) if context is not None else []
        if context is not None and context.name:
            command = f"{self.command} {context.name}"
            hint = f"its options: {self.command} --help {context.name}"
        else:
            hint = f"its options: {self.command} --help"
        return f"{command} has no {flag}\n  {_nearest(flag, known) or hint}"

    def _usage(self, task: str) -> str:
        context = self.parser.contexts[task]
        places = [argument.name.upper() for argument in context.positional_args]
        return " ".join(
            [
                "usage:",
                self.command,
                task,
                *places,
                *(["[options]"] if context.help_tuples() else []),
            ]
        )

    # -- help

    def parse_cleanup(self) -> None:
        """As Invoke does, but complete first: an unfinished command line may be invalid. Raises
        ParseError for `--help` of an unknown task."""
        if self.args.complete.value:
            typed = self.core.remainder.split(" ")[1:] or [""]
            contexts = self._make_parser().contexts
            for candidate in candidates(typed, contexts, self.initial_context, self._folder):
                print(candidate)
            raise InvokeExit
        task = self.args.help.value
        if isinstance(task, str) and task not in self.parser.contexts:
            hint = _nearest(task, self.parser.contexts) or f"{self.command} --help lists the tasks"
            raise ParseError(f"error: there is no task {task!r}\n  {hint}")
        super().parse_cleanup()

    def parse_core(self, argv: list[str] | None) -> None:
        """As Invoke does, with completion scripts that also serve `./inv`."""
        self.normalize_argv(argv)
        self.parse_core_args()
        shell = self.args["print-completion-script"].value
        if not shell:
            super().parse_core(self.argv)
            return
        if shell not in SCRIPTS:
            raise InvokeExit(
                f"error: there is no completion script for {shell!r}\n  one of"
                f" {', '.join(SCRIPTS)}",
                code=1,
            )
        print(SCRIPTS[shell])
        raise InvokeExit

    def print_version(self) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"trainkit {version(DISTRIBUTION)}")
        except PackageNotFoundError:
            print("trainkit (not installed)")

    def print_help(self) -> None:
        """The page of `./inv` without arguments: the tasks by purpose."""
        command = self.command
        width = min(MAX_WIDTH, pty_size()[0])
        print(
            f"usage: {command} TASK [arguments] [options]\n\ntrainkit: from raw text to a trained"
            " language model, from one jobs.toml.\n"
        )
        known = {
            name: (inspect.getdoc(task) or "").partition("\n")[0]
            for name, task in self.collection.tasks.items()
        }
        shown = {name for names in GROUPS.values() for name in names}
        further = {
            "Of this project": tuple(name for name in sorted(known) if name not in shown),
            "": (),
        }
        column = max((len(name) for name in known), default=0)
        for heading, names in {**GROUPS, **further}.items():
            if present := [name for name in names if name in known]:
                print(f"{heading}:")
                for name in present:
                    print(
                        textwrap.fill(
                            known[name],
                            width,
                            initial_indent=f"  {name:<{column}}  ",
                            subsequent_indent=" " * (column + 4),
                        )
                    )
                print()
        print(
            f"{command} --help TASK explains a task; {command} --list --list-format=json lists all"
            " for programs."
        )
        print(
            f"{command} --print-completion-script bash (zsh, fish) prints shell completion for"
            " tasks, jobs, runs and keys."
        )

    def print_task_help(self, name: str) -> None:
        """The page of one task: usage, description, options."""
        context = self.parser.contexts[name]
        print(self._usage(name) + "\n")
        width = min(MAX_WIDTH, pty_size()[0])
        for line in (inspect.getdoc(self.collection[name]) or "").splitlines():
            print(textwrap.fill(line, width))
        print()
        if tuples := context.help_tuples():
            print("Options:")
            self.print_columns(tuples)


def _nearest(token: str, known: Iterable[object]) -> str:
    """A question that names the nearest of `known`, or ""."""
    close = difflib.get_close_matches(token, [str(name) for name in known], 1)
    return f"did you mean {close[0]}?" if close else ""


def _flags_for(token: str, context: ParserContext, folder: Path) -> list[str]:
    """Flags of a task for which `token` is a name of jobs.toml."""
    return [
        flag
        for flag, kind in TABLES.items()
        if f"--{flag}" in context.flags and token in names_of(kind, folder)
    ]


def main() -> None:
    """The console command."""
    try:
        try:
            TrainkitProgram(name="trainkit", binary="trainkit", binary_names=["trainkit"]).run()
        finally:
            flush(sys.stdout)
    except BrokenPipeError:  # of help, completion and the like; tasks end by themselves
        sys.exit(end_without_reader().code)


def _words_as_options(given: list[str], flag: str) -> list[str]:
    """`test tests/data -k pack` as `test --path tests/data -k pack`: Invoke knows no optional
    argument without a flag."""
    found = given[:1]
    is_value = False
    for token in given[1:]:
        if not token.startswith("-") and not is_value:
            found.append(flag)
        found.append(token)
        is_value = token in ("-k", "-p", "--path", "--torch", "--name", "--device")
    return found
