"""The program `trainkit`, which `./inv` is too: Invoke with the tasks built in, a help page of
its own, hints, and completion of names.

Everything that `invoke` understands it understands as well. A tasks.py at or above the current
folder is used as `invoke` would use it; without one the tasks are there all the same. Imports
neither pydantic nor torch nor rich.
"""

from __future__ import annotations

import difflib
import inspect
import os
import textwrap
from pathlib import Path

from invoke.exceptions import CollectionNotFound, ParseError
from invoke.exceptions import Exit as InvokeExit
from invoke.parser.context import ParserContext
from invoke.program import Program
from invoke.terminals import pty_size

from trainkit.base.extras import DISTRIBUTION
from trainkit.cli.completion import NAMES, SCRIPTS, candidates, names_of
from trainkit.cli.wrapper import command_in

GROUPS = {
    "Begin": ("init", "jobs", "show", "check", "plan"),
    "Prepare": ("build", "prep-data", "data-stats", "data-verify"),
    "Run": ("train", "resume", "attach", "cancel"),
    "Follow": ("runs", "status", "logs", "why", "checkpoints", "report", "tensorboard"),
    "After training": ("generate", "evaluate", "export", "replay", "clean"),
    "Hosts": ("nodes", "doctor", "setup-hosts", "fleet"),
    "This checkout": ("test", "bench"),
}
WIDEST = 100  # columns of a help page
UNKNOWN = "No idea what"  # how Invoke's parser begins its words about a token that it does not know


class TrainkitProgram(Program):
    """Invoke's program with trainkit's tasks in it."""

    @property
    def command(self) -> str:
        """How the person calls it."""
        return command_in(Path(self.config._project_prefix or os.curdir))

    # -- which tasks there are

    def load_collection(self) -> None:
        """That of tasks.py, or trainkit's own where there is none."""
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
        """As Invoke does; but the tasks are loaded before `--help`, which shows them."""
        self.load_collection()
        self.list_root = None
        self.list_depth = None
        self.list_format = "flat"
        self.scoped_collection = self.collection

    # -- what the words mean

    def parse_tasks(self) -> None:
        """As Invoke does, with a hint where a word means nothing, and with `train --help` for
        `--help train`."""
        words = self.core.unparsed
        if len(words) > 1 and words[1] in ("--help", "-h"):
            self.args.help.value = words[0]
            self.core.unparsed = []
        elif words[:1] == ["test"]:
            self.core.unparsed = _with_paths(words)
        try:
            super().parse_tasks()
        except ParseError as error:
            if error.context is not None and error.context.missing_positional_args:
                wanted = " and a ".join(
                    str(a.name).upper() for a in error.context.missing_positional_args
                )
                task = str(error.context.name)
                raise ParseError(
                    f"error: {task} needs a {wanted}\n  {self._usage(task)}", error.context
                ) from None
            if not str(error).startswith(UNKNOWN):
                raise
            raise ParseError(f"error: {self._explained(error)}", error.context) from None

    def _explained(self, error: ParseError) -> str:
        """What is wrong with the word that the parser stopped at, and the nearest that is known."""
        word = str(error).removeprefix(f"{UNKNOWN} ").removesuffix(" is!").strip("'\"")
        context = error.context
        folder = Path(self.config._project_prefix or os.curdir)
        if context is not None:
            task = context.name
        else:
            task = None
        if word.startswith("-"):
            if context is not None:
                flags = list(context.flags)
            else:
                flags = []
            if task:
                of = f"{self.command} {task}"
            else:
                of = self.command
            way_out = (
                _nearest(word, flags) or f"its flags: {self.command} --help {task or ''}".rstrip()
            )
            return f"{of} has no {word}\n  {way_out}"
        if context is not None and task is not None:
            if ways := [
                f"{self.command} {task} --{flag} {word}"
                for flag in _flags_for(word, context, folder)
            ]:
                return f"{task} takes {word!r} behind a flag\n  did you mean {' or '.join(ways)}?"
            return (
                f"{task} takes no word {word!r} here, and no task is called so\n "
                f" {_nearest(word, self.parser.contexts) or self._usage(task)}"
            )
        return (
            f"there is no task {word!r}\n "
            f" {_nearest(word, self.parser.contexts) or f'{self.command} --help lists the tasks'}"
        )

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
        """Completion first: what is typed so far need not make sense."""
        if self.args.complete.value:
            words = self.core.remainder.split(" ")[1:] or [""]
            contexts = self._make_parser().contexts
            for candidate in candidates(
                words,
                contexts,
                self.initial_context,
                Path(self.config._project_prefix or os.curdir),
            ):
                print(candidate)
            raise InvokeExit
        halp = self.args.help.value
        if isinstance(halp, str) and halp not in self.parser.contexts:
            known = _nearest(halp, self.parser.contexts) or f"{self.command} --help lists the tasks"
            raise ParseError(f"error: there is no task {halp!r}\n  {known}")
        super().parse_cleanup()

    def parse_core(self, argv: list[str] | None) -> None:
        """As Invoke does, with completion scripts that know `./inv`."""
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
            print("trainkit, not installed")

    def print_help(self) -> None:
        """The page of bare `./inv`: the tasks by what they are for."""
        command = self.command
        width = min(WIDEST, pty_size()[0])
        print(
            f"usage: {command} TASK [words and flags]\n\ntrainkit: from raw text to a trained"
            " language model, from one jobs.toml.\n"
        )
        known = {name: _first_line(task) for name, task in self.collection.tasks.items()}
        shown = {name for names in GROUPS.values() for name in names}
        further = {
            "Of this project": tuple(name for name in sorted(known) if name not in shown),
            "": (),
        }
        room = max((len(name) for name in known), default=0)
        for heading, names in {**GROUPS, **further}.items():
            if there := [name for name in names if name in known]:
                print(f"{heading}:")
                for name in there:
                    print(
                        textwrap.fill(
                            known[name],
                            width,
                            initial_indent=f"  {name:<{room}}  ",
                            subsequent_indent=" " * (room + 4),
                        )
                    )
                print()
        print(
            f"{command} --help TASK says what a task takes; --list --list-format=json lists them"
            " for programs."
        )
        print(
            f"{command} --print-completion-script bash (zsh, fish) completes tasks, jobs, runs and"
            " keys: eval it in your shell's start file."
        )

    def print_task_help(self, name: str) -> None:
        """What a task takes."""
        context = self.parser.contexts[name]
        print(self._usage(name) + "\n")
        width = min(WIDEST, pty_size()[0])
        for line in (inspect.getdoc(self.collection[name]) or "").splitlines():
            print(textwrap.fill(line, width))
        print()
        if tuples := context.help_tuples():
            print("Options:")
            self.print_columns(tuples)


def _first_line(task: object) -> str:
    return (inspect.getdoc(task) or "").partition("\n")[0]


def _nearest(word: str, known: object) -> str:
    """A question that names the nearest of `known`, or nothing."""
    close = difflib.get_close_matches(word, [str(name) for name in known], 1)  # type: ignore[attr-defined]
    if close:
        return f"did you mean {close[0]}?"
    return ""


def _flags_for(word: str, context: ParserContext, folder: Path) -> list[str]:
    """Flags of a task behind which `word` is a name of jobs.toml."""
    return [
        flag
        for flag, kind in NAMES.items()
        if f"--{flag}" in context.flags and word in names_of(kind, folder)
    ]


def main() -> None:
    """The console command."""
    TrainkitProgram(name="trainkit", binary="trainkit", binary_names=["trainkit"]).run()


def _with_paths(words: list[str]) -> list[str]:
    """`test tests/data -k pack` as `test --path tests/data -k pack`: Invoke knows no word that
    may be left out."""
    found = words[:1]
    value = False
    for word in words[1:]:
        found += [word] if word.startswith("-") or value else ["--path", word]
        value = word in ("-k", "-p", "--path")
    return found
