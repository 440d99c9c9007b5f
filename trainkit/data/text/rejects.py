"""Lines that are not documents: the first one stops the shard (on_error = "stop"), or they are
kept in a file (on_error = "skip") while they are few."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.files import atomic_open
from trainkit.data.text.decompress import COMPRESSED
from trainkit.data.text.documents import BadLine

# lines after which the fraction is looked at, besides the end: a shard that is all bad ends early
CHECK_EVERY = 10_000


def read_to_end(where: str, rest: Iterable[object]) -> None:
    """Read what is left of a file that carries sums of its bytes: they lie behind what they are
    of, and a damaged byte is a bad line before it counts as damage. Raises ConfigError (exit 6)
    where the file or archive is damaged."""
    if any(part.lower().endswith((*COMPRESSED, ".tgz", ".zip")) for part in where.split("!")):
        for _ in rest:
            pass


def raise_bad(bad: BadLine, rest: Iterable[object] = ()) -> NoReturn:
    """Raise ConfigError (exit 6) with file, line, reason and the bytes around; where `rest` of
    the file, what is still to be read of it, shows that it is damaged, that is raised instead."""
    read_to_end(bad.where, rest)
    around = f": {bad.around}" if bad.around else ""
    raise ConfigError(
        [Problem(f"{bad.reason}{around}", SourceLocation(bad.where, bad.line), bad.hint)],
        exit=Exit.STAGE_FAILED,
    )


class Rejects:
    """What is done with bad lines of one shard. A context manager: the file is there when the
    block ends without an exception, if there was a bad line.

    Args:
        path: where skipped lines go, one {"file", "line", "kind", "reason", "around"} each; a
            former one is removed. None: nowhere.
        skip: go on after bad lines.
        max_fraction: of lines that may be bad.

    Attributes:
        counts: {kind: lines}.
    """

    def __init__(self, path: Path | None, *, skip: bool, max_fraction: float) -> None:
        self.path = path
        self.skip = skip
        self.max_fraction = max_fraction
        self.counts: dict[str, int] = {}
        self._stack = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self._last: BadLine | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def total(self) -> int:
        """Bad lines so far."""
        return sum(self.counts.values())

    def add(self, bad: BadLine, rest: Iterable[object] = ()) -> None:
        """Take in one bad line. Raises ConfigError (exit 6) as `raise_bad`, unless they are
        skipped."""
        if not self.skip:
            raise_bad(bad, rest)
        if self._file is None and self.path is not None:
            self._file = self._stack.enter_context(atomic_open(self.path))
        if self._file is not None:
            value: dict[str, object] = {
                "file": bad.where,
                "line": bad.line,
                "kind": bad.kind,
                "reason": bad.reason,
                "around": bad.around,
            }
            self._file.write(json.dumps(value).encode() + b"\n")
        self.counts[bad.kind] = self.counts.get(bad.kind, 0) + 1
        self._last = bad

    def check(self, lines: int, rest: Iterable[object] = ()) -> None:
        """Raise ConfigError (exit 6) if more than `max_fraction` of `lines`, those so far, were
        bad; or as `read_to_end`."""
        if self._last is None or self.total <= self.max_fraction * lines:
            return
        read_to_end(self._last.where, rest)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        message = (
            f"{self.total:,} of {lines:,} lines are bad ({kinds}), more than max_reject_fraction ="
            f" {self.max_fraction:g} allows; the last: {self._last.reason}"
        )
        if self._last.around:
            hint = f"the bytes around: {self._last.around}"
        else:
            hint = "look at the file, or set datasets.X.max_reject_fraction to more"
        raise ConfigError(
            [Problem(message, SourceLocation(self._last.where, self._last.line), hint)],
            exit=Exit.STAGE_FAILED,
        )
