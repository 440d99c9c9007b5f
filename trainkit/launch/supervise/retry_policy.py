"""Whether a run goes on after a failure, and on which hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from trainkit.base.errors import Exit
from trainkit.jobs.schema import RetrySettings
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.runs.folder import RunFolder
from trainkit.runs.world import read_world

RetryDecision = Literal["again", "enough", "no-progress"]
# the next attempt would get the same answer
NEVER_RETRIED = {Exit.CONFIG, Exit.PLAN, Exit.NO_CHECKPOINT, Exit.BUG}


class RetryBudgets:
    """How often each kind of failure may still happen, and how often the same one has happened
    at the same step."""

    def __init__(self, retry: RetrySettings) -> None:
        self.left = {
            "infra": retry.infra,
            "hang": retry.hang,
            "user": retry.user,
            "preempted": retry.preempted,
        }
        self.left |= {"preemption": retry.preemption, "time-limit": retry.time_limit}
        self.same_step = retry.same_step
        self._former: tuple[object, ...] | None = None
        self._times = 0

    def decide(self, end: AttemptResult, kind: str = "") -> RetryDecision:
        """What follows from one more failure; `end.budget` says what it has used up. One that
        was asked for, or success, is not a failure: do not come with it.

        Args:
            kind: the budget that it uses up; by default that of its class.
        """
        outcome = end.outcome
        cause = outcome.root_cause or {}
        kind = kind or outcome.failure_class
        what = (
            kind,
            end.step,
            cause.get("type") or cause.get("signal") or cause.get("code"),
            cause.get("host") if not end.began else None,
        )
        self._times = self._times + 1 if what == self._former else 1
        self._former = what
        budget = self.left.get(kind, 0)
        if budget == 0 or outcome.exit in NEVER_RETRIED:
            return "enough"
        if self._times >= self.same_step:
            return "no-progress"
        self.left[kind] = budget - 1
        end.budget = kind
        return "again"


class HostChoice:
    """The hosts of a run, and which of them are left out.

    Args:
        hosts: all, spares too.
        places: names of the hosts of the attempt before, in order of their ranks.
    """

    def __init__(self, hosts: Sequence[Host], places: Sequence[str] = ()) -> None:
        self.hosts = tuple(hosts)
        self.places = tuple(places)
        self.excluded: dict[str, str] = {}  # why, by name: not taken while others will do

    @classmethod
    def of_run(cls, run: RunFolder) -> HostChoice:
        """Those of a run, as its last attempt left them."""
        places = [node.host for node in read_world(run).nodes] if run.world.exists() else []
        return cls(HostList.from_file(run.hosts).hosts, places)

    def available(self) -> list[Host]:
        """Those not left out, in order."""
        return [host for host in self.hosts if host.name not in self.excluded]

    def choose(
        self, nodes: int, fits: Callable[[int], bool], ready: Collection[str] = ()
    ) -> tuple[Host, ...]:
        """Hosts of the next attempt: `nodes` of the usable ones, those `ready` before others; fewer
        if `fits` says that the job can run on so many; else all again, in the hope that those left
        out are back. Where there are as many as before each keeps its place, and with it the state
        in its memory."""
        usable = sorted(self.available(), key=lambda host: host.name not in ready)
        most = next((n for n in range(min(nodes, len(usable)), 0, -1) if n == nodes or fits(n)), 0)
        if not most:
            self.excluded.clear()
        chosen = {host.name: host for host in (usable[:most] if most else self.hosts[:nodes])}
        if len(chosen) == len(self.places):
            others = iter([name for name in chosen if name not in self.places])
            self.places = tuple(n if n in chosen else next(others) for n in self.places)
        else:
            self.places = tuple(chosen)
        return tuple(chosen[name] for name in self.places)
