"""step = "function": a Python function of the user's, from a file."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.read_back import ID, ORIGIN
from trainkit.jobs.curation import FunctionStep

Answer = bool | str | None


class _TooLong(BaseException):
    """Not an Exception, which the function may catch."""


class OwnFunction:
    """Calls function(text, fields): True keeps the document, False or None leaves it out, a text
    replaces its own; `fields` is its to change, but for the id and the place."""

    def __init__(self, table: FunctionStep, language: str) -> None:
        self._name = table.function
        self._seconds = table.timeout_seconds
        self._function = _imported(table.function)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        own = {name: document.fields[name] for name in (ID, ORIGIN) if name in document.fields}
        try:
            with _at_most(self._seconds), redirect_stdout(sys.stderr):  # stdout is the unit's
                answer = self._function(document.text, document.fields)
        except _TooLong:
            raise self._error(
                document,
                f"did not return within {self._seconds:g} s",
                "mend it, or give the step more by timeout_seconds",
            ) from None
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise self._error(
                document,
                f"raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})",
                "mend it: what is done is kept",
            ) from None
        document.fields |= own
        if isinstance(answer, str):
            document.text = self._checked(document, answer)
        elif not isinstance(answer, bool) and answer is not None:
            raise self._error(
                document,
                f"returned {answer!r:.60}",
                "return True, False or the text that is to stand there",
            )
        elif not answer:
            return Dropped("function", detail=self._name.rpartition("/")[2])
        return None

    def _checked(self, document: CrawledDocument, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._error(
                document,
                f"returned half of a character (at {error.start})",
                "return text that UTF-8 can hold",
            ) from None
        return text

    def _error(self, document: CrawledDocument, what: str, hint: str) -> ConfigError:
        origin = document.fields.get(ORIGIN, "")
        return ConfigError(
            f"the function {self._name} {what}, at {origin}", exit=Exit.STAGE_FAILED, hint=hint
        )


def _imported(name: str) -> Callable[[str, dict[str, object]], Answer]:
    """The function. Raises ConfigError (exit 6): no file, no such name, an import that fails."""
    path, _, attribute = name.rpartition(":")
    module = ModuleType(f"trainkit_own_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
        function: Callable[[str, dict[str, object]], Answer] = getattr(module, attribute)
        if not callable(function):
            raise TypeError(f"{attribute} is not a function")
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the function {name} cannot be imported: {type(error).__name__}: {error}",
            exit=Exit.STAGE_FAILED,
            hint="the file must be importable by itself, and define that name",
        ) from None
    return function


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # compiled code that does not return to Python is ended with its process
    signal.setitimer(signal.ITIMER_PROF, 2 * seconds + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
