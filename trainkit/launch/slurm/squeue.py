"""What Slurm says of a job: squeue for those it still knows, sacct (where accounting is enabled)
for older ones. Nothing waits here."""

from __future__ import annotations

import datetime
import pwd
import re
import time
from collections.abc import Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.launch.scheduler_contract import JobAccount
from trainkit.launch.slurm.allocation import slurm_output

# job, state, reason, (expected) start, time limit, nodes: squeue(1), --format
FIELDS = "%i|%T|%r|%S|%l|%N"
WAITING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
HELD = frozenset({"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
# versions print them with blanks or without
HELD_REASON = re.compile(
    r"JobHeld(User|Admin)|launch.failed.requeued.held|job.requeued.in.held.state"
)
RUNNING = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
UNSURE = "UNSURE"  # no word of Slurm's: the job is over, and who could say how cannot be asked now
ACCOUNT_FIELDS = "JobID,State,ExitCode,Submit,Start,End,Timelimit,NodeList"  # sacct(1), --format
# slurmdbd answers at once, or it is in trouble: sacct itself tries for three quarters of a minute
# then
ACCOUNT_SECONDS = 10.0
# seconds between two questions about a job, while nothing changes
FASTEST = 1.0
SLOWEST = 30.0
GROWTH = 1.4


@dataclass(frozen=True)
class JobStatus:
    """A job, or an element of an array, as Slurm sees it now.

    Args:
        id: Slurm's number; of an element ARRAY_INDEX.
        state: Slurm's word: PENDING, RUNNING, CANCELLED, ...; or UNSURE.
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
        return self.state not in WAITING and self.state not in RUNNING

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def array(self) -> str:
        """The number of its array; its own where it is not an element."""
        return self.id.partition("_")[0]

    @property
    def held(self) -> bool:
        """Whether it waits for a person: Slurm holds it, because its launch failed, say."""
        held = self.state in HELD or HELD_REASON.fullmatch(self.reason) is not None
        return self.waits and held

    def words(self) -> str:
        """One line for a person who waits."""
        if self.state == "CONFIGURING":
            return f"job {self.id}: its nodes are booting ({self.nodes})"
        if self.held:
            return f"job {self.id} is held ({self.reason}): `scontrol release {self.id}` lets it go"
        if self.waits:
            if self.start not in ("N/A", "Unknown", ""):
                expected = f", expected to start {self.start}"
            else:
                expected = ""
            return f"job {self.id} waits: {self.reason}{expected}"
        if not self.over:
            return f"job {self.id} is {self.state} on {self.nodes}"
        return f"job {self.id} is over: {self.ending()}"

    def ending(self) -> str:
        """How it ended. squeue's reason of a job that was cancelled is why it had waited before;
        sacct's says who did it."""
        if self.state == UNSURE:
            return self.reason
        stale = self.state == "CANCELLED" and not self.reason.startswith("by ")
        if stale or self.reason == "None":
            return self.state
        return f"{self.state} ({self.reason})"


def job_statuses(ids: Sequence[str]) -> dict[str, JobStatus]:
    """Those of the jobs that Slurm knows, by id. Raises TrainkitError (exit 8) where slurmctld
    cannot be asked."""
    found = {status.id: status for status in element_statuses(ids)}
    return found | _forgotten([id for id in ids if id not in found])


def element_statuses(ids: Sequence[str]) -> list[JobStatus]:
    """All elements of the jobs that slurmctld still knows. Raises as `job_statuses`."""
    if not ids:
        return []
    try:
        text = slurm_output(
            [
                "squeue",
                "--noheader",
                "--array",  # an element a line, by the name that its run knows it by
                "--states=all",
                f"--jobs={','.join(ids)}",
                f"--format={FIELDS}",
            ]
        )
    except TrainkitError as error:
        if "Invalid job id" not in error.message:
            raise
        text = ""
    rows = [[part.strip() for part in line.split("|")] for line in text.splitlines()]
    return [JobStatus(*row) for row in rows if len(row) == FIELDS.count("|") + 1]


def account_status(account: JobAccount) -> JobStatus:
    """A row of sacct as squeue would have shown it."""
    who = account.state.partition(" by ")[2]
    why = f"by {_user(who)}" if who else f"exit code {account.code}"
    return JobStatus(
        account.id, account.state_word, why, account.start, account.limit, account.nodes
    )


def job_accounts(ids: Sequence[str]) -> list[JobAccount] | None:
    """All that slurmdbd keeps of jobs, of each of their elements, starts and steps, oldest
    first; None where there is no accounting.

    Raises TrainkitError (exit 8) where slurmdbd cannot be asked.
    """
    words = [
        "sacct",
        "--duplicates",
        "--noheader",
        "--parsable2",
        f"--jobs={','.join(ids)}",
        f"--format={ACCOUNT_FIELDS}",
    ]
    try:
        text = slurm_output(words, ACCOUNT_SECONDS)
    except TrainkitError as error:
        if (
            "accounting storage is disabled" in error.message
            or "there is no sacct" in error.message
        ):
            return None
        raise TrainkitError(
            f"slurmdbd cannot be asked ({error.message})",
            exit=error.exit,
            hint="`sacctmgr show cluster` tries the same",
        ) from None
    rows = [line.split("|") for line in text.splitlines()]
    return [
        JobAccount(*row)
        for row in rows
        if len(row) == ACCOUNT_FIELDS.count(",") + 1
        and not {row[0].partition(".")[0], row[0].partition(".")[0].partition("_")[0]}.isdisjoint(
            ids
        )
    ]


def _forgotten(ids: Sequence[str]) -> dict[str, JobStatus]:
    """What slurmdbd says of jobs that slurmctld has forgotten. Those that it does not know
    either, and all where there is no accounting, are left out."""
    try:
        rows = job_accounts(ids) if ids else None
    except TrainkitError as error:
        return {id: _unsure(id, f"slurmctld has forgotten it, and {error.message}") for id in ids}
    # the newest start counts
    found = {row.id: account_status(row) for row in rows or () if row.id in ids}
    for id, seen in found.items():
        if not seen.over:  # slurmctld, which alone could run it, does not know it
            why = f"slurmctld does not know it, and slurmdbd still says {seen.state}"
            found[id] = _unsure(id, why)
    return found


def _unsure(id: str, why: str) -> JobStatus:
    return JobStatus(id, UNSURE, why, "", "", "")


def _user(number: str) -> str:
    try:
        return pwd.getpwuid(int(number)).pw_name
    except (KeyError, ValueError):
        return f"user {number}"


@dataclass(frozen=True)
class JobDetails:
    """What slurmctld says of a job to the supervisor that runs in it.

    Args:
        state: Slurm's word.
        restarts: how often it was put back into the queue.
        preempted: its nodes are wanted for another job; within a partition's GraceTime it runs on,
            and only its steps are asked to end (TERM).
        start: when it began, by time.time(); None where Slurm does not say.
        end: when its time is over; None: never, or Slurm does not say.
        excluded: nodes that it is not to have, as a node list; "" for none.
        partition: which one.
    """

    state: str
    restarts: int
    preempted: bool
    start: float | None
    end: float | None
    excluded: str
    partition: str

    @property
    def ours(self) -> bool:
        """Whether its nodes are still its own, for some seconds at least; otherwise Slurm is
        ending it."""
        return self.state in RUNNING - {"COMPLETING", "STAGE_OUT"} or self.state == "CONFIGURING"

    @property
    def limit(self) -> float | None:
        """Seconds from its start to the end of its time."""
        if self.end is not None and self.start is not None:
            return self.end - self.start
        return None


def job_details(id: str) -> JobDetails:
    """How a job stands with slurmctld. Raises TrainkitError (exit 8) where that cannot be asked,
    or knows no such job."""
    words = slurm_output(["scontrol", "--oneliner", "show", "job", id]).split()
    facts = {key: value for key, equals, value in (word.partition("=") for word in words) if equals}
    return JobDetails(
        facts.get("JobState", ""),
        int(facts.get("Restarts") or 0),
        # not there for jobs that cannot be preempted
        facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"),
        _seconds(facts.get("StartTime", "")),
        _seconds(facts.get("EndTime", "")),
        facts.get("ExcNodeList", "(null)").replace("(null)", ""),
        facts.get("Partition", ""),
    )


def kill_wait() -> float:
    """Seconds from Slurm's TERM to its KILL (slurm.conf(5), KillWait). Raises TrainkitError (exit
    8)."""
    text = slurm_output(["scontrol", "show", "config"])
    found = re.search(r"^KillWait\s*= (\d+) sec", text, re.MULTILINE)
    if found is None:
        raise TrainkitError("scontrol show config has no KillWait", exit=Exit.START)
    return float(found[1])


def requeue(id: str, restarts: int) -> None:
    """Put a running job back into the queue; well, too, if Slurm has done so since it had been
    restarted so often. Raises TrainkitError (exit 8)."""
    try:
        slurm_output(["scontrol", "requeue", id])
    except TrainkitError:
        if job_details(id).restarts <= restarts:
            raise


def _seconds(text: str) -> float | None:
    """A time as Slurm prints it, in the time zone that is ours too; None for "Unknown", and for
    what SLURM_TIME_FORMAT makes of it."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def failed_nodes(names: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm has given up: down, or failing. Raises TrainkitError (exit
    8)."""
    nodes = _nodes(f"--nodes={','.join(names)}")
    return sorted({name for name, state in nodes if state.startswith(("down", "fail"))})


def usable_nodes(partition: str) -> list[str]:
    """Nodes of a partition that take jobs, now or later. Raises TrainkitError (exit 8)."""
    bad = ("down", "drain", "fail", "unk")
    nodes = _nodes(f"--partition={partition}")
    return sorted({name for name, state in nodes if not state.startswith(bad)})


def _nodes(which: str) -> list[tuple[str, str]]:
    text = slurm_output(["sinfo", "--noheader", "--Node", which, "--format=%N|%T"])
    rows = (line.partition("|") for line in text.splitlines())
    return [(name, state) for name, bar, state in rows if bar]


class PollBackoff:
    """When to ask next: soon after a change, ever more rarely without one. slurmctld serves the
    whole cluster."""

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
