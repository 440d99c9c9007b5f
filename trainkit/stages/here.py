"""Runs units as processes of this machine, as many at once as there are cores."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit, Place, Problem, TrainkitError
from trainkit.base.files import remove_leftovers, write_json
from trainkit.base.process import reap, running, start, stop
from trainkit.base.unit import PARENT_VARIABLE
from trainkit.stages.contract import Need, Unit
from trainkit.stages.run import Reporter
from trainkit.stages.stamps import unit_folder, write_unit_stamp

POLL_SECONDS = 0.05
GRACE_SECONDS = 8.0  # pip takes its time to undo what it has done; other units end at once


class _Worker:
    """One unit's process: its lines of JSON are read as they come, the rest goes to its log."""

    def __init__(self, unit: Unit, folder: Path) -> None:
        spec, self.log = folder / f"{unit.name}.spec.json", folder / f"{unit.name}.log"
        remove_leftovers(spec)
        write_json(spec, dict(unit.spec))
        self.unit, self.fraction, self._rest = unit, 0.0, b""
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        with open(self.log, "wb") as log:
            env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
            self.child = start([*unit.argv, str(spec)], env=env, cwd=folder, stdout=subprocess.PIPE, stderr=log)
        assert self.child.stdout is not None
        self.pipe = self.child.stdout
        os.set_blocking(self.pipe.fileno(), False)

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
            if not isinstance(said, dict):
                continue
            if "progress" in said:
                self.fraction = said["progress"] / max(1, said["total"])
            self.result, self.error = said.get("result", self.result), said.get("error", self.error)
        return bool(data)

    def failure(self, code: int) -> TrainkitError:
        """The error to raise for a process that ended without a result."""
        if self.error is not None:
            problems = [Problem(p["message"], Place(p["file"], p["line"]) if p.get("file") else None, p.get("hint", "")) for p in self.error["problems"]]
            return ConfigError(problems, exit=Exit(self.error["exit"]))
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        tail = "\n  ".join(self.log.read_text(errors="replace").splitlines()[-8:])
        hint = f"its log is {self.log}" + (f"\n  {tail}" if tail else "")
        return TrainkitError(f"{self.unit.name} {how}", exit=Exit.STAGE_FAILED, hint=hint)


def execute_here(need: Need, units: Sequence[Unit], stamps: Path, reporter: Reporter) -> None:
    """Run `units` in the order their `after` asks for. The first failure, or Ctrl-C, stops the others and leaves finished ones stamped."""
    folder = unit_folder(stamps, need.name)
    waiting = {unit.name: unit for unit in units}
    workers: dict[str, _Worker] = {}
    slots = len(os.sched_getaffinity(0))
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or workers:
                ready = [u for u in waiting.values() if not any(name in waiting or name in workers for name in u.after)]
                for unit in ready[: slots - len(workers)]:
                    workers[unit.name] = worker = _Worker(waiting.pop(unit.name), folder)
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
                for key, _ in selector.select(POLL_SECONDS):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                        _collect(key.data, need, stamps)
                        del workers[key.data.unit.name]
                        reporter.progress(key.data.unit, 1.0)
                for worker in workers.values():
                    reporter.progress(worker.unit, worker.fraction)
        finally:
            stop([w.child for w in workers.values()], GRACE_SECONDS)


def _collect(worker: _Worker, need: Need, stamps: Path) -> None:
    while running(worker.child):
        time.sleep(0.005)  # its output has ended, so it is about to
    code = reap(worker.child)
    worker.pipe.close()
    if code != 0 or worker.result is None:
        raise worker.failure(code)
    write_unit_stamp(need, worker.unit, stamps, worker.result)
    if worker.log.stat().st_size == 0:
        worker.log.unlink()
