"""What an attempt begins with and what it leaves: the supervisor's context, its session, its
result."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import FULL
from trainkit.jobs.schema import Job
from trainkit.launch.containers import node_container, reusable_since
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Launcher
from trainkit.launch.protocol.server import Server
from trainkit.launch.session import Session
from trainkit.launch.supervise.failure_rules import FailureRules
from trainkit.launch.supervise.observer import GuardedObserver
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.rank_environment import passed_environment
from trainkit.launch.supervise.rendezvous import StartError
from trainkit.launch.supervise.root_watch import RootWatch
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.runs.events import FailureClass, RootCause, SurvivingProcess
from trainkit.runs.folder import RunFolder


@dataclass(frozen=True)
class AttemptContext:
    """What all attempts of one supervisor share.

    Args:
        launcher: what starts the agents.
        server: where they knock.
        secrets: names and values that only the ranks' environment holds.
        rules: what failures mean.
        share: run beside other runs on the same slots.
        stop_requests: what asks the supervisor to end the run.
        observer: how a person follows.
        root: whose clock stands still while the shared root does not answer.
        fence: returns when no rank of an earlier attempt can write any more; before that none of
            this one is started.
    """

    launcher: Launcher
    server: Server
    secrets: Mapping[str, str]
    rules: FailureRules
    share: bool
    stop_requests: StopRequests
    observer: GuardedObserver
    root: RootWatch
    fence: Callable[[], Awaitable[None]]


@dataclass
class AttemptResult:
    """How an attempt ended, and what the next one must know.

    Args:
        outcome: exit class and root cause.
        began: all ranks were started.
        step: the furthest step of any rank.
        survivors: processes that outlived everything.
        unanswered: hosts that did not say what is left on them.
        uncertain: hosts on which something may still run: contact was lost, or they did not say
            that nothing is left.
        lost: how many contacts were lost.
        lost_at: when the lease of the last of the uncertain hosts began to run out, by
            time.monotonic(); None: there are none, or nothing is left there.
        again: another attempt follows; the supervisor decides.
        budget: what another attempt, here or later, has used up; "": there is to be none.
    """

    outcome: Outcome
    began: bool = False
    step: int = 0
    survivors: list[SurvivingProcess] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)
    lost: int = 0
    lost_at: float | None = None
    again: bool = False
    budget: str = ""


def new_session(run: RunFolder, number: int, job: Job, hosts: Sequence[Host]) -> Session:
    """The session of an attempt whose agents are still to be started; of a run that is not there
    yet the code's hash is not known."""
    folder = run.session(number)
    code = run.code.resolve().name if run.code.exists() else "SHA256"
    box = None
    if not job.starts_by_srun:
        box = node_container(job, folder, run.id, number, reusable_since(run))
    return Session(
        folder,
        run.id,
        number,
        hosts,
        job.cluster,
        run.root / "code" / code,
        run.attempt(number).transports,
        passed_environment(),
        box,
        job.stop_grace,
    )


def outcome_of_error(error: Exception) -> Outcome:
    """How an attempt ends that an error of our own process ended."""
    if isinstance(error, StartError):
        return error.outcome
    if isinstance(error, TrainkitError):
        failure_class: FailureClass = "user" if error.exit == Exit.CONFIG else "infra"
        return Outcome(error.exit, failure_class, {"message": error.message, "advice": error.hint})
    if isinstance(error, OSError):
        cause: RootCause = {"message": f"the supervisor cannot go on: {error}"}
        if error.errno in FULL:
            cause["advice"] = f"make room on the file system of {error.filename}"
        return Outcome(Exit.RANK_INFRA, "infra", cause)
    # a mistake of ours, or a report of a host that nobody foresaw: the result still has to say
    # what is left on the hosts
    traceback.print_exception(error)
    message = f"the supervisor failed: {type(error).__name__}: {error}"
    return Outcome(Exit.BUG, "infra", {"message": message})
