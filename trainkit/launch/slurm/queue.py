"""What Slurm says of a job: squeue for those it still knows, sacct (where accounting is enabled) for older ones. Nothing waits here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.base.errors import TrainkitError
from trainkit.launch.slurm.allocation import ask

FIELDS = "%i|%T|%r|%S|%l|%N"  # job, state, reason, (expected) start, time limit, nodes: squeue(1), --format
BEFORE = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
FASTEST, SLOWEST, GROWTH = 1.0, 30.0, 1.4  # seconds between two questions about a job, while nothing changes


@dataclass(frozen=True)
class JobLook:
    """A job as Slurm sees it now.

    Args:
        id: Slurm's number.
        state: Slurm's word: PENDING, RUNNING, CANCELLED, ...
        reason: why it waits, or why it ended; "None" where there is none.
        start: when it is expected to start, or did; "N/A" where Slurm does not know.
        limit: its time limit.
        nodes: its node list, "" while it has none.
    """

    id: str
    state: str
    reason: str
    start: str
    limit: str
    nodes: str

    @property
    def over(self) -> bool:
        """Whether it will not run any more."""
        return self.state not in BEFORE and self.state not in RUNNING

    @property
    def waits(self) -> bool:
        return self.state in BEFORE

    def words(self) -> str:
        """One line for a person who waits."""
        if self.state == "CONFIGURING":
            return f"job {self.id}: its nodes are booting ({self.nodes})"
        if self.waits:
            expected = f", expected to start {self.start}" if self.start not in ("N/A", "Unknown", "") else ""
            return f"job {self.id} waits: {self.reason}{expected}"
        return f"job {self.id} is {self.state} on {self.nodes}" if not self.over else f"job {self.id} is over: {self.state} ({self.reason})"


def look(ids: Sequence[str]) -> dict[str, JobLook]:
    """Those of the jobs that Slurm knows, by id. Raises TrainkitError (exit 8) where slurmctld cannot be asked."""
    if not ids:
        return {}
    try:
        text = ask(["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", f"--format={FIELDS}"])
    except TrainkitError as error:
        if "Invalid job id" not in error.message:
            raise
        text = ""
    found = {look.id: look for line in text.splitlines() if (look := _parsed(line)) is not None}
    for id in ids:
        if id not in found and (old := _in_accounts(id)) is not None:
            found[id] = old
    return found


def _parsed(line: str) -> JobLook | None:
    parts = [part.strip() for part in line.split("|")]
    return JobLook(*parts) if len(parts) == FIELDS.count("|") + 1 else None


def _in_accounts(id: str) -> JobLook | None:
    """What slurmdbd keeps of a job; None where it is not known there, or there is no accounting."""
    try:
        text = ask(["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={id}", "--format=State,ExitCode,Start,Timelimit,NodeList"])
    except TrainkitError:
        return None
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 4]
    if not rows:
        return None
    state, code, start, limit, nodes = rows[-1]
    return JobLook(id, state.split()[0], f"exit code {code}", start, limit, nodes)


def put_back(id: str, restarts: int) -> tuple[bool, bool]:
    """(whether Slurm has put a job back into the queue since it had been restarted so often, whether it was preempted). Raises TrainkitError (exit 8)."""
    words = ask(["scontrol", "--oneliner", "show", "job", id]).split()
    facts = {key: value for key, equals, value in (word.partition("=") for word in words) if equals}
    return int(facts.get("Restarts") or 0) > restarts, facts.get("PreemptTime", "None") != "None"  # the latter is not there for other jobs


def failed_nodes(names: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm has given up: down, or failing. Raises TrainkitError (exit 8)."""
    text = ask(["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%T"])
    rows = {tuple(line.split("|")) for line in text.splitlines() if line.count("|") == 1}
    return sorted({name for name, state in rows if state.startswith(("down", "fail"))})


class Patience:
    """When to ask next: soon after a change, ever more rarely without one. slurmctld serves the whole cluster."""

    def __init__(self) -> None:
        self._gap = FASTEST
        self._next = 0.0

    def due(self) -> bool:
        """Whether it is time to ask; the clock for the next time starts then."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._gap
        self._gap = min(SLOWEST, self._gap * GROWTH)
        return True

    def changed(self) -> None:
        """Something has changed: ask soon again."""
        self._gap = FASTEST
        self._next = time.monotonic() + FASTEST
