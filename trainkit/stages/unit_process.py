"""In which order units begin, what the process of one or several units has said, wherever it
runs, and what becomes of it: stamps, progress, the error to raise. And units as processes of this
machine, as many at once as there are cores."""

from __future__ import annotations

import contextlib
import heapq
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import is_running, reap_child, start_child, stop_children
from trainkit.base.worker import (
    PARENT_VARIABLE,
    error_from_report,
    how_it_ended,
    said_by_worker,
)
from trainkit.stages.contract import Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.stamps import unit_folder, write_unit_stamp

# bytes of units that share a process, how many do at most, and turns that are left for each process
# then
SMALL = 2**26
BATCH = 16
TURNS = 4
TINY = 2**20  # bytes that take less time than the start of a process: no turns are left for them
POLL_SECONDS = 0.05
GRACE_SECONDS = 8.0  # pip takes its time to undo what it has done; other units end at once
FETCHES = 4  # units at once, at least, that wait for the network


class UnitQueue:
    """Units in the order their `after` asks for; of those that could begin, the largest first,
    so that none is left for the end."""

    def __init__(self, units: Sequence[Unit]) -> None:
        names = {unit.name for unit in units}
        self._number = {unit.name: number for number, unit in enumerate(units)}
        self._waits_for = {unit.name: len(names.intersection(unit.after)) for unit in units}
        self._followers: dict[str, list[Unit]] = {}
        self._ready: dict[bool, list[tuple[int, int, Unit]]] = {False: [], True: []}
        for unit in units:
            for name in names.intersection(unit.after):
                self._followers.setdefault(name, []).append(unit)
            self.offer(unit)

    def offer(self, unit: Unit) -> None:
        """A unit can begin if it waits for none; one whose host was lost has to be done again."""
        if self._waits_for[unit.name] == 0:
            heapq.heappush(self._ready[unit.network], (-unit.size, self._number[unit.name], unit))

    def take(self, free: Mapping[bool, int], most: Mapping[bool, int]) -> Iterator[list[Unit]]:
        """Units to begin now, those of a list in one process: at most free[network] processes of
        either kind, of most[network] there may be."""
        for network, slots in free.items():
            ready = self._ready[network]
            for _ in range(min(slots, len(ready))):
                if not ready:
                    break
                batch = [heapq.heappop(ready)[2]]
                # as many as leave all processes several turns: nobody is to wait for one long list
                # at the end
                if batch[0].several and batch[0].size <= SMALL:
                    turns = 1 if batch[0].size <= TINY and not network else TURNS
                    length = min(BATCH, len(ready) // (turns * most[network]))
                else:
                    length = 0
                while (
                    len(batch) <= length
                    and ready[0][2].several
                    and ready[0][2].argv == batch[0].argv
                ):
                    batch.append(heapq.heappop(ready)[2])
                yield batch

    def done(self, unit: Unit) -> None:
        """A unit has succeeded: others may begin."""
        for follower in self._followers.pop(unit.name, ()):
            self._waits_for[follower.name] -= 1
            self.offer(follower)

    def waiting(self) -> list[str]:
        """Names of units that still wait for another."""
        return [name for name, count in self._waits_for.items() if count]

    def __bool__(self) -> bool:
        return any(self._ready.values())


COUNTS = ("tokens", "text_bytes")


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
        """What a unit says to people; of the first one, what starts the process has to write
        it."""
        return self.folder / f"{unit.name}.log"

    def feed(self, data: bytes) -> None:
        """Take in what the process has printed."""
        whole, end, self._rest = (self._rest + data).rpartition(b"\n")
        for said in said_by_worker(whole + end):
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
        if code == 0 and not self.waiting:
            return
        unit = (self.waiting or self.units)[0]
        name = unit.name if self.waiting or self.error is None else ""
        raise unit_error(name, self.host, code, self.error, self.log(unit))

    def forget_log(self, unit: Unit) -> None:
        """Delete the log of a unit that had nothing to say."""
        with contextlib.suppress(FileNotFoundError):
            if self.log(unit).stat().st_size == 0:
                self.log(unit).unlink()


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
    lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    return TrainkitError(
        f"{unit}{where} {how_it_ended(code)}",
        exit=Exit.STAGE_FAILED,
        hint="\n  ".join([f"its log is {log}", *lines]),
    )


class UnitTracker:
    """What has been done of a need: stamps what succeeded, lets begin what waited for it, tells
    those who watch.

    Args:
        work: what is to be done.
    """

    def __init__(self, work: StageWork) -> None:
        self.work = work
        self.queue = UnitQueue(work.units)
        self.folder = unit_folder(work.stamps, work.need.name)

    def take_results(self, batch: UnitProcess) -> None:
        """Stamp what a batch has finished, and let begin what waited for it."""
        for unit, result in batch.results:
            write_unit_stamp(self.work.need, unit, self.work.stamps, result)
            batch.forget_log(unit)
            self.queue.done(unit)
            self._report(unit, {name: result[name] for name in COUNTS if name in result}, 1.0)
        batch.results.clear()

    def report(self, batch: UnitProcess) -> None:
        """Say how far the unit at hand is."""
        if batch.waiting:
            self._report(batch.waiting[0], batch.counts, batch.fraction)

    def _report(self, unit: Unit, counts: Mapping[str, int], fraction: float) -> None:
        if counts:
            self.work.reporter.counted(unit, counts)
        self.work.reporter.progress(unit, fraction)

    def close(self) -> None:
        """All units that could begin have been done."""
        assert not self.queue.waiting(), f"units wait for each other: {self.queue.waiting()[:5]}"


class LocalUnitProcess(UnitProcess):
    """A batch whose process is a child of this one."""

    def __init__(self, units: Sequence[Unit], folder: Path) -> None:
        super().__init__(units, folder)
        with open(self.log(units[0]), "wb") as log:
            env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
            self.child = start_child(
                [*units[0].argv, *map(str, self.specs)],
                env=env,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.child.stdout is not None
        self.pipe = self.child.stdout
        os.set_blocking(self.pipe.fileno(), False)

    def read(self) -> bool:
        """Take in what has been printed. Returns False at the end of the output."""
        data = self.pipe.read(2**16)
        if data is None:
            return True
        self.feed(data)
        return bool(data)

    def collect(self) -> None:
        """Collect the process after the end of its output. Raises TrainkitError as `end`."""
        while is_running(self.child):
            time.sleep(0.005)  # its output has ended, so it is about to
        code = reap_child(self.child)
        self.pipe.close()
        self.end(code)


def process_limits(workers: int | None) -> dict[bool, int]:
    """Processes of this machine at once: {False: that compute, True: that wait for the network}."""
    computing = workers or len(os.sched_getaffinity(0))
    return {False: computing, True: max(FETCHES, computing)}


def execute_locally(work: StageWork) -> None:
    """Run units in the order their `after` asks for: `work.workers` that compute, and as many
    again, at least 4, that fetch beside them. The first failure, or Ctrl-C, stops the others and
    leaves finished ones stamped."""
    ledger = UnitTracker(work)
    most = process_limits(work.workers)
    at_work: list[LocalUnitProcess] = []
    with selectors.DefaultSelector() as selector:
        try:
            while ledger.queue or at_work:
                busy = sum(batch.units[0].network for batch in at_work)
                for begun in list(
                    ledger.queue.take(
                        {False: most[False] - len(at_work) + busy, True: most[True] - busy}, most
                    )
                ):
                    at_work.append(batch := LocalUnitProcess(begun, ledger.folder))
                    selector.register(batch.pipe, selectors.EVENT_READ, batch)
                for key, _ in selector.select(POLL_SECONDS):
                    batch = key.data
                    goes_on = batch.read()
                    ledger.take_results(batch)
                    if not goes_on:
                        selector.unregister(key.fileobj)
                        batch.collect()
                        at_work.remove(batch)
                for batch in at_work:
                    ledger.report(batch)
            ledger.close()
        finally:
            stop_children([batch.child for batch in at_work], GRACE_SECONDS)
