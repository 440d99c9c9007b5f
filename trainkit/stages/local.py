"""Runs units as processes of this machine, as many at once as there are cores."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.process import is_running, reap_child, start_child, stop_children
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.stages.contract import Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.unit_process import UnitProcess, UnitTracker

POLL_SECONDS = 0.05
GRACE_SECONDS = 8.0  # pip takes its time to undo what it has done; other units end at once
FETCHES = 4  # units at once, at least, that wait for the network


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
