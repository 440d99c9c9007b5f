"""The supervisor of one attempt: starts the ranks of this host, watches, stops all at the first bad exit, records the truth."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any

from trainkit.base.errors import Exit
from trainkit.base.files import read_json, write_json
from trainkit.base.process import identity, reap, running, start, stop
from trainkit.base.redact import Redactor
from trainkit.launch.outcome import Outcome, RankEnd, judge_outcome, said_done
from trainkit.launch.world import rank_environment
from trainkit.runs.folder import AttemptFolder
from trainkit.runs.record import EventLog

POLL_SECONDS = 0.05
ECHO_SECONDS = 0.5  # how long peers of a failed rank have to write down their own view before they are stopped
GRACE_SECONDS = 3.0  # TERM to KILL
TEARDOWN_SECONDS = 20.0  # from the good end of one rank to that of the last: they all end at the same step


class Interrupts:
    """Counts what asks the supervisor to stop: Ctrl-C, TERM, and the hang-up of a closed terminal."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def _heard(self, number: int, frame: object) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interrupts]:
        """Take the three signals for the block; afterwards they are as before."""
        heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup's wish
        before = {number: signal.signal(number, self._heard) for number in heeded}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _pump(source: IO[bytes], log: FileIO, redactor: Redactor) -> None:
    """Copy a rank's output to its log, line by line, without secrets. A disk that takes no more must not stop the rank: its pipe is read on."""
    with log:
        for line in source:
            rest = redactor.bytes(line)
            with contextlib.suppress(OSError):
                while rest:
                    rest = rest[log.write(rest) :]


class Supervisor:
    """One attempt on this host.

    Args:
        world: the form world/1.
        attempt: where events, logs, errors and heartbeats go.
        secrets: values that only the ranks' environment holds.
        tick: called some twenty times a second while the ranks run; for progress.
        notice: called with one line when the supervisor does something a person should know.
    """

    def __init__(
        self, world: Mapping[str, Any], attempt: AttemptFolder, secrets: Mapping[str, str], tick: Callable[[], None], notice: Callable[[str], None]
    ) -> None:
        self.world, self.attempt, self.secrets, self.tick, self.notice = world, attempt, secrets, tick, notice
        self.events = EventLog(attempt)
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.ends: list[RankEnd] = []
        self.pumps: list[threading.Thread] = []
        self.redactor = Redactor(secrets.values())
        self.viewing = True

    def record_start(self) -> None:
        """Write the first event: from now on the run's state hangs on this process's life."""
        self.events.write("started", run=self.world["run"], attempt=self.attempt.number, supervisor=identity().as_dict(), world_size=self.world["world_size"])

    def run(self, interrupts: Interrupts) -> Outcome:
        """Start the ranks, follow them to their end and record it. Never leaves a process behind."""
        outcome: Outcome | None = None
        try:
            outcome = self._start()
            if outcome is None:
                self._watch(interrupts)
        except BaseException as error:
            outcome = Outcome(Exit.BUG, "infra", {"message": f"the supervisor failed: {type(error).__name__}: {error}"})
            raise
        finally:
            survivors = self._stop_all("the supervisor ends")
            for pump in self.pumps:
                pump.join(timeout=5)
            self._redact_errors()
            outcome = outcome or judge_outcome(self.attempt, self.ends, self.world["world_size"], interrupts.first)
            self.events.write("ended", exit=int(outcome.exit), root_cause=outcome.root_cause, survivors=survivors, **{"class": outcome.failure_class})
            self.events.close()
        return outcome

    def show(self, view: Callable[[], None]) -> None:
        """Call a view. One that fails (a closed terminal, a reader that has gone) is called no more; the run goes on."""
        if not self.viewing:
            return
        try:
            view()
        except (Exception, SystemExit) as error:  # rich raises SystemExit where the pipe is closed
            self.viewing = False
            self.events.write("view_lost", reason=f"{type(error).__name__}: {error}")

    def _redact_errors(self) -> None:
        """Take secrets out of what the ranks wrote down about their failures."""
        for rank in self.world["nodes"][0]["ranks"]:
            path = self.attempt.error(rank)
            with contextlib.suppress(OSError, ValueError):
                value = read_json(path)
                clean = self.redactor.value(value)
                if clean != value:
                    write_json(path, clean)

    def _start(self) -> Outcome | None:
        """Start the ranks; returns the outcome where one could not be started."""
        try:
            self._start_ranks()
        except OSError as error:
            return Outcome(Exit.START, "infra", {"message": f"could not start all ranks: {error}"})
        return None

    def _start_ranks(self) -> None:
        node, command = self.world["nodes"][0], self.world["command"]
        for folder in (self.attempt.log(0).parent, self.attempt.error(0).parent, self.attempt.heartbeat(0).parent):
            folder.mkdir(parents=True, exist_ok=True)
        for local_rank, rank in enumerate(node["ranks"]):
            environment = rank_environment(self.world, 0, local_rank, self.attempt, identity().pid, self.secrets)
            log = FileIO(self.attempt.log(rank), "a")
            child = start(command["argv"], env=environment, cwd=Path(command["cwd"]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.children[rank] = child
            assert child.stdout is not None
            pump = threading.Thread(target=_pump, args=(child.stdout, log, self.redactor), daemon=True)
            pump.start()
            self.pumps.append(pump)
            self.events.write("rank_started", rank=rank, host=node["host"], pid=child.pid)
        self.events.write("go")

    def _watch(self, interrupts: Interrupts) -> None:
        heeded = 0
        deadline = float("inf")  # when ranks that still run are stopped
        while self.children:
            for rank in [r for r, child in self.children.items() if not running(child)]:
                end = self._ended(rank, stopped=False)
                well = end.code in (Exit.DONE, Exit.PREEMPTED) or said_done(self.attempt, rank)
                deadline = min(deadline, time.monotonic() + (TEARDOWN_SECONDS if well else ECHO_SECONDS))
            if time.monotonic() > deadline:
                self._stop_all("a rank has ended and its peers go on")
            if interrupts.count > heeded:
                heeded = interrupts.count
                self._heed(heeded)
            self.show(self.tick)
            time.sleep(POLL_SECONDS)

    def _heed(self, times: int) -> None:
        if times == 1:
            self.show(lambda: self.notice("saving at the end of this step, then stopping; Ctrl-C again stops at once"))
            self.events.write("saving", ranks=sorted(self.children))
            for child in self.children.values():
                if running(child):
                    os.kill(child.pid, signal.SIGUSR1)  # send_signal would reap it
        else:
            self._stop_all("it was asked to stop at once")

    def _ended(self, rank: int, *, stopped: bool) -> RankEnd:
        child = self.children.pop(rank)
        end = RankEnd(rank, self.world["nodes"][0]["host"], reap(child), time.time(), stopped)
        self.ends.append(end)
        self.events.write("rank_ended", rank=rank, code=end.code, stopped=stopped, done=said_done(self.attempt, rank))
        return end

    def _stop_all(self, reason: str) -> list[dict[str, Any]]:
        """TERM, KILL after the grace; returns what outlived that."""
        if not self.children:
            return []
        self.events.write("stopping", reason=reason, ranks=sorted(self.children))
        outlived = set(stop(list(self.children.values()), GRACE_SECONDS))
        survivors = [{"rank": rank, "pid": child.pid, "host": self.world["nodes"][0]["host"]} for rank, child in self.children.items() if child.pid in outlived]
        for rank in [r for r, child in self.children.items() if child.pid not in outlived]:
            self._ended(rank, stopped=True)
        self.children.clear()
        return survivors
