"""What the process of one or several units has said, wherever it runs, and what becomes of it:
stamps, progress, the error to raise."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.worker import error_from_report
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageReporter
from trainkit.stages.queue import UnitQueue
from trainkit.stages.stamps import unit_folder, write_unit_stamp

COUNTS = ("tokens", "text_bytes")

# Told now and then what a unit has written so far: {"tokens": .., "text_bytes": ..}.
OnCounts = Callable[[Unit, Mapping[str, int]], None]


class UnitProcess:
    """A process that does one unit, or several small ones in turn: its lines of JSON are taken
    in as they come, the rest goes to each unit's log.

    Args:
        units: in the order in which it does them.
        folder: of specs and logs.
        host: where it runs, None for here; named in errors.
    """

    def __init__(self, units: Sequence[Unit], folder: Path, host: str | None = None) -> None:
        self.specs = [folder / f"{unit.name}.spec.json" for unit in units]
        for unit, spec in zip(units, self.specs, strict=True):
            write_json(spec, dict(unit.spec))
        self.folder = folder
        self.units = list(units)
        self.host = host
        self._rest = b""
        self.waiting = list(units)  # for their result, in this order
        # of the unit at hand
        self.fraction = 0.0
        self.counts = dict[str, int]()
        self.results: list[tuple[Unit, Mapping[str, Any]]] = []  # that nobody has taken yet
        self.error: dict[str, object] | None = None

    def log(self, unit: Unit) -> Path:
        """What a unit says to people; of the first one, whoever starts the process has to write
        it."""
        return self.folder / f"{unit.name}.log"

    def feed(self, data: bytes) -> None:
        """Take in what the process has printed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # some library's print; the unit's own lines are all JSON
            if isinstance(said, dict):
                self._feed_line(said)

    def _feed_line(self, said: dict[str, Any]) -> None:
        self.error = said.get("error", self.error)
        if "progress" in said:
            self.fraction = said["progress"] / max(1, said["total"])
            self.counts = {name: said[name] for name in COUNTS if name in said}
        if "result" in said and self.waiting:
            self.results.append((self.waiting.pop(0), said["result"]))
            self.fraction = 0.0
            self.counts = {}

    def end(self, code: int) -> None:
        """The process has ended with `code` (negative: a signal). Raises TrainkitError if it
        failed or did not do all of its units."""
        if code != 0 or self.waiting:
            raise self._failure(code)

    def forget_log(self, unit: Unit) -> None:
        """Delete the log of a unit that had nothing to say."""
        with contextlib.suppress(FileNotFoundError):
            if self.log(unit).stat().st_size == 0:
                self.log(unit).unlink()

    def _failure(self, code: int) -> TrainkitError:
        """The error to raise for a process that ended without a result."""
        unit = (self.waiting or self.units)[0]
        return unit_error(
            unit.name if self.waiting or self.error is None else "",
            self.host,
            code,
            self.error,
            self.log(unit),
        )


def unit_error(
    unit: str, host: str | None, code: int, error: dict[str, object] | None, log: Path
) -> TrainkitError:
    """What to raise for a unit that failed.

    Args:
        unit: its name; "" where it is not known.
        host: where it ran; None: here, which needs no name.
        code: of its process; negative: a signal.
        error: its own words, if it left any.
        log: what it said to people.
    """
    where = f" on {host}" if host else ""
    if error is not None:
        return error_from_report(error, f"{unit}{where}: " if where and unit else "")
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    if code == -signal.SIGKILL:
        how += ", as the kernel does when memory runs out (dmesg tells)"
    lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    return TrainkitError(
        f"{unit}{where} {how}",
        exit=Exit.STAGE_FAILED,
        hint="\n  ".join([f"its log is {log}", *lines]),
    )


class UnitTracker:
    """What has been done of a need: stamps what succeeded, lets begin what waited for it, tells
    whoever watches.

    Args:
        need: whose units they are.
        units: those to be done.
        stamps: the folder of the stage's stamps.
        reporter: told how far each unit is.
        counted: told what units have written.
    """

    def __init__(
        self,
        need: Need,
        units: Sequence[Unit],
        stamps: Path,
        reporter: StageReporter,
        counted: OnCounts | None,
    ) -> None:
        self.need = need
        self.stamps = stamps
        self.reporter = reporter
        self.counted = counted
        self.queue = UnitQueue(units)
        self.folder = unit_folder(stamps, need.name)

    def take_results(self, batch: UnitProcess) -> None:
        """Stamp what a batch has finished, and let begin what waited for it."""
        for unit, result in batch.results:
            write_unit_stamp(self.need, unit, self.stamps, result)
            batch.forget_log(unit)
            self.queue.done(unit)
            self._report(unit, {name: result[name] for name in COUNTS if name in result}, 1.0)
        batch.results.clear()

    def report(self, batch: UnitProcess) -> None:
        """Say how far the unit at hand is."""
        if batch.waiting:
            self._report(batch.waiting[0], batch.counts, batch.fraction)

    def _report(self, unit: Unit, counts: Mapping[str, int], fraction: float) -> None:
        if self.counted is not None and counts:
            self.counted(unit, counts)
        self.reporter.progress(unit, fraction)

    def close(self) -> None:
        """All units that could begin have been done."""
        assert not self.queue.waiting(), f"units wait for each other: {self.queue.waiting()[:5]}"
