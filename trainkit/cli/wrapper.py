"""One wrapper makes every Invoke task: `--json`, `--dry-run`, errors, exit codes and Ctrl-C behave the same everywhere.

Imports neither pydantic nor torch nor rich: `invoke --list` must be quick.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke.context import Context
from invoke.exceptions import Exit as Leave
from invoke.tasks import Task

from trainkit.base.errors import Exit, TrainkitError

if TYPE_CHECKING:
    from rich.console import Console

COMMON_HELP = {"json": "print one JSON document on stdout, prose on stderr", "dry-run": "change nothing, print exactly what would be done"}


@dataclass(frozen=True)
class Talk:
    """How a task speaks: what it was asked for, and where its words go. `folder` is that of tasks.py."""

    json: bool
    dry_run: bool
    folder: Path

    @functools.cached_property
    def console(self) -> Console:
        """For prose and tables: stdout, or stderr under `--json`."""
        from rich.console import Console

        return Console(stderr=self.json, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """One line of plain prose."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)


@dataclass(frozen=True)
class Answer:
    """What a task's function returns: the document of `--json`, and the exit code."""

    document: dict[str, Any]
    exit: Exit = Exit.DONE


Body = Callable[..., Answer | None]


def make_task(
    *, positional: Iterable[str] = (), iterable: Iterable[str] = (), help: dict[str, str] | None = None, reports: bool = False, dry: bool = False
) -> Callable[[Body], Task[Any]]:
    """Turn a function (Talk, words...) into an Invoke task.

    Args:
        positional: parameters that are required words.
        iterable: parameters that may be given several times.
        help: a line for each parameter, by its flag's name.
        reports: the task takes `--json`.
        dry: the task takes `--dry-run`, and `invoke --dry` means the same.
    """

    def decorate(body: Body) -> Task[Any]:
        own = list(inspect.signature(body).parameters.values())[1:]
        words = [p.name for p in own]
        extra = [n for n, wanted in (("json", reports), ("dry_run", dry)) if wanted]

        @functools.wraps(body)
        def run(context: Context, **values: Any) -> None:
            dry_run = bool(values.pop("dry_run", False)) or (dry and bool(context.config.run.dry))
            # Invoke keeps the folder of the tasks.py it found only here
            folder = Path(context.config._project_prefix or os.curdir).absolute()
            talk = Talk(json=bool(values.pop("json", False)), dry_run=dry_run, folder=folder)
            _refuse_flag_words(body, {n: values[n] for n in positional})
            _call(talk, lambda: body(talk, **{n: values[n] for n in words}))

        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter("context", keyword), *own, *(inspect.Parameter(n, keyword, default=False) for n in extra)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Invoke reads
        texts = {**{n.replace("_", "-"): COMMON_HELP[n.replace("_", "-")] for n in extra}, **(help or {})}
        return Task(run, positional=list(positional), iterable=list(iterable), help=texts, auto_shortflags=False)

    return decorate


def _refuse_flag_words(body: Body, words: dict[str, str]) -> None:
    """Invoke takes `train --help` as "train the job called --help"."""
    for name, word in words.items():
        if word.startswith("-"):
            verb = body.__name__.replace("_", "-")
            raise Leave(f"error: {verb} needs a {name.upper()} before {word!r}\n  for its help: invoke --help {verb}", code=Exit.USAGE)


def _call(talk: Talk, body: Callable[[], Answer | None]) -> None:
    try:
        answer = body()
    except TrainkitError as error:
        if talk.json:
            print(json.dumps({"schema": "error/1", "exit": int(error.exit), "problems": error.problems()}, ensure_ascii=False))
        raise Leave(f"error: {error}", code=int(error.exit)) from None
    except KeyboardInterrupt:
        raise Leave("interrupted; what was finished is kept", code=Exit.INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: `invoke runs | head`
        raise Leave(code=128 + signal.SIGPIPE) from None
    except OSError as error:
        raise Leave(f"error: {error.strerror or error}: {error.filename or ''}", code=Exit.STAGE_FAILED) from None
    except Leave:
        raise
    except Exception:
        traceback.print_exc()
        raise Leave("error: this is a bug in trainkit; please report it with the lines above", code=Exit.BUG) from None
    if answer is None:
        return
    if talk.json:
        print(json.dumps(answer.document, ensure_ascii=False))
    if answer.exit:
        raise Leave(code=int(answer.exit))
