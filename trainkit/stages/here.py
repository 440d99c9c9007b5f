"""Runs units as processes of this machine, as many at once as there are cores."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import reap, running, start, stop
from trainkit.base.unit import PARENT_VARIABLE, error_from
from trainkit.stages.contract import Need, Unit
from trainkit.stages.run import Reporter
from trainkit.stages.stamps import unit_folder, write_unit_stamp

POLL_SECONDS = 0.05
GRACE_SECONDS = 8.0  # pip takes its time to undo what it has done; other units end at once
FETCHES = 4  # units at once, at least, that wait for the network
SMALL, BATCH, TURNS = 2**26, 16, 4  # bytes of units that share a process, how many do at most, and turns that are left for each process then
COUNTS = ("tokens", "text_bytes")

# Told now and then what a unit has written so far: {"tokens": .., "text_bytes": ..}.
Counted = Callable[[Unit, Mapping[str, int]], None]


class _Worker:
    """A process that does one unit, or several small ones in turn: its lines of JSON are read as they come, the rest goes to each unit's log."""

    def __init__(self, units: Sequence[Unit], folder: Path) -> None:
        specs = [folder / f"{unit.name}.spec.json" for unit in units]
        for unit, spec in zip(units, specs, strict=True):
            write_json(spec, dict(unit.spec))
        self.folder, self.units, self.network, self._rest = folder, list(units), units[0].network, b""
        self.waiting = list(units)  # for their result, in this order
        self.fraction, self.counts = 0.0, dict[str, int]()  # of the unit at hand
        self.results: list[tuple[Unit, dict[str, Any]]] = []  # that nobody has taken yet
        self.error: dict[str, Any] | None = None
        with open(self._log(units[0]), "wb") as log:
            env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
            self.child = start([*units[0].argv, *map(str, specs)], env=env, cwd=folder, stdout=subprocess.PIPE, stderr=log)
        assert self.child.stdout is not None
        self.pipe = self.child.stdout
        os.set_blocking(self.pipe.fileno(), False)

    def _log(self, unit: Unit) -> Path:
        return self.folder / f"{unit.name}.log"

    def read(self) -> bool:
        """Take in what the process has printed. Returns False at the end of its output."""
        data = self.pipe.read(2**16)
        if data is None:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # some library's print; the unit's own lines are all JSON
            if isinstance(said, dict):
                self._hear(said)
        return bool(data)

    def _hear(self, said: dict[str, Any]) -> None:
        self.error = said.get("error", self.error)
        if "progress" in said:
            self.fraction = said["progress"] / max(1, said["total"])
            self.counts = {name: said[name] for name in COUNTS if name in said}
        if "result" in said and self.waiting:
            self.results.append((self.waiting.pop(0), said["result"]))
            self.fraction, self.counts = 0.0, {}

    def end(self) -> None:
        """Collect the process after the end of its output. Raises TrainkitError if it failed or did not do all of its units."""
        while running(self.child):
            time.sleep(0.005)  # its output has ended, so it is about to
        code = reap(self.child)
        self.pipe.close()
        if code != 0 or self.waiting:
            raise self._failure(code)

    def forget_log(self, unit: Unit) -> None:
        """Delete the log of a unit that had nothing to say."""
        with contextlib.suppress(FileNotFoundError):
            if self._log(unit).stat().st_size == 0:
                self._log(unit).unlink()

    def _failure(self, code: int) -> TrainkitError:
        """The error to raise for a process that ended without a result."""
        if self.error is not None:
            return error_from(self.error)
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        if code == -signal.SIGKILL:
            how += ", as the kernel does when memory runs out (dmesg tells)"
        unit = (self.waiting or self.units)[0]
        lines = self._log(unit).read_text(errors="replace").splitlines()[-8:] if self._log(unit).exists() else []
        hint = "\n  ".join([f"its log is {self._log(unit)}", *lines])
        return TrainkitError(f"{unit.name} {how}", exit=Exit.STAGE_FAILED, hint=hint)


class _Queue:
    """Units in the order their `after` asks for; of those that could begin, the largest first, so that none is left for the end."""

    def __init__(self, units: Sequence[Unit]) -> None:
        names = {unit.name for unit in units}
        self._number = {unit.name: number for number, unit in enumerate(units)}
        self._waits_for = {unit.name: len(names.intersection(unit.after)) for unit in units}
        self._followers: dict[str, list[Unit]] = {}
        self._ready: dict[bool, list[tuple[int, int, Unit]]] = {False: [], True: []}
        for unit in units:
            for name in names.intersection(unit.after):
                self._followers.setdefault(name, []).append(unit)
            self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        if self._waits_for[unit.name] == 0:
            heapq.heappush(self._ready[unit.network], (-unit.size, self._number[unit.name], unit))

    def take(self, free: Mapping[bool, int], most: Mapping[bool, int]) -> Iterator[list[Unit]]:
        """Units to begin now, those of a list in one process: at most free[network] processes of either kind, of most[network] there may be."""
        for network, slots in free.items():
            ready = self._ready[network]
            for _ in range(min(slots, len(ready))):
                if not ready:
                    break
                batch = [heapq.heappop(ready)[2]]
                # as many as leave all processes several turns: nobody is to wait for one long list at the end
                length = min(BATCH, len(ready) // (TURNS * most[network])) if batch[0].several and batch[0].size <= SMALL else 0
                while len(batch) <= length and ready[0][2].several and ready[0][2].argv == batch[0].argv:
                    batch.append(heapq.heappop(ready)[2])
                yield batch

    def done(self, unit: Unit) -> None:
        """A unit has succeeded: others may begin."""
        for follower in self._followers.pop(unit.name, ()):
            self._waits_for[follower.name] -= 1
            self._offer(follower)

    def waiting(self) -> list[str]:
        """Names of units that still wait for another."""
        return [name for name, count in self._waits_for.items() if count]

    def __bool__(self) -> bool:
        return any(self._ready.values())


def execute_here(need: Need, units: Sequence[Unit], stamps: Path, reporter: Reporter, *, workers: int | None = None, counted: Counted | None = None) -> None:
    """Run `units` in the order their `after` asks for. The first failure, or Ctrl-C, stops the others and leaves finished ones stamped.

    Args:
        workers: processes that compute at once; by default one a core. As many again, and at least 4, may fetch beside them.
        counted: told what units have written.
    """
    folder, queue = unit_folder(stamps, need.name), _Queue(units)
    most = {False: workers or len(os.sched_getaffinity(0))}
    most[True] = max(FETCHES, most[False])
    at_work: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            while queue or at_work:
                busy = sum(worker.network for worker in at_work)
                for batch in list(queue.take({False: most[False] - len(at_work) + busy, True: most[True] - busy}, most)):
                    at_work.append(worker := _Worker(batch, folder))
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
                for key, _ in selector.select(POLL_SECONDS):
                    worker = key.data
                    goes_on = worker.read()
                    _take_results(worker, need, stamps, queue, reporter, counted)
                    if not goes_on:
                        selector.unregister(key.fileobj)
                        worker.end()
                        at_work.remove(worker)
                for worker in at_work:
                    if worker.waiting:
                        _report(worker.waiting[0], worker.counts, worker.fraction, reporter, counted)
            assert not queue.waiting(), f"units wait for each other: {queue.waiting()[:5]}"
        finally:
            stop([worker.child for worker in at_work], GRACE_SECONDS)


def _report(unit: Unit, counts: Mapping[str, int], fraction: float, reporter: Reporter, counted: Counted | None) -> None:
    if counted is not None and counts:
        counted(unit, counts)
    reporter.progress(unit, fraction)


def _take_results(worker: _Worker, need: Need, stamps: Path, queue: _Queue, reporter: Reporter, counted: Counted | None) -> None:
    """Stamp what a worker has finished, and let begin what waited for it."""
    for unit, result in worker.results:
        write_unit_stamp(need, unit, stamps, result)
        worker.forget_log(unit)
        queue.done(unit)
        _report(unit, {name: result[name] for name in COUNTS if name in result}, 1.0, reporter, counted)
    worker.results.clear()
