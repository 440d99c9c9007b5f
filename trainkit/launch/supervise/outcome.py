"""Why an attempt ended: exit class and root cause from the ranks' exit codes and error files,
and from lost contacts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property

from trainkit.base.documents import utc_text
from trainkit.base.errors import Exit
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.printable import printable
from trainkit.launch.supervise.failure_rules import FailureRules
from trainkit.runs.events import FailureClass, RootCause

# What a rank says when a peer died under it: never the root cause while another rank says something
# else.
PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "[c10d]",
    "connectFullMesh",
    "gloo/transport",
    "ProcessGroup",
)
# exit codes that failure rules may refine; a rank that gives another one knows why it failed
REFINED = (Exit.RANK_USER, Exit.RANK_INFRA)
SILENT_EXIT: RootCause = {
    "exit": int(Exit.RANK_INFRA),
    "message": "exited with 0 and had not recorded success",
}
_EXIT_OF_CLASS = {"infra": Exit.RANK_INFRA, "hang": Exit.HANG, "preempted": Exit.PREEMPTED}


class StopRequest(Enum):
    """What asked a run to end before it was done."""

    INTERRUPT = "Ctrl-C"
    SAVE = "a request to save and stop"
    CANCEL = "invoke cancel"


@dataclass(frozen=True)
class RankExit:
    """How one rank's process ended.

    Args:
        rank: the rank.
        host: where it ran.
        code: its exit code, negative for a signal.
        time: when, seconds since the epoch by the supervisor's clock.
        stopped: we ended it ourselves.
        done: it recorded success before its teardown.
        error: what it wrote down about its failure, the form rank-error/1.
        last: its last lines.
        oom: the kernel killed it for want of memory.
        log: where its output is.
    """

    rank: int
    host: str
    code: int
    time: float
    stopped: bool
    done: bool = False
    error: Mapping[str, object] | None = None
    last: Sequence[str] = ()
    oom: bool = False
    log: str = ""


@dataclass(frozen=True)
class LostContact:
    """An agent that is heard no more. `time`: when it was heard last; `silent`: nothing was
    closed, so its ranks may still run for a while."""

    host: str
    why: str
    time: float
    silent: bool


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. `suspects`: hosts that should be left out for a while."""

    exit: Exit
    failure_class: FailureClass
    root_cause: RootCause | None
    suspects: tuple[str, ...] = field(default=())

    @property
    def is_settled(self) -> bool:
        """Whether nobody goes on from what ranks have kept in memory: all is on the disk, or the
        run was stopped at once."""
        saved = bool(self.root_cause and self.root_cause.get("saved"))
        return saved or self.failure_class in ("success", "cancelled")


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 77" for one that Python does not know."""
    if number in {s.value for s in signal.Signals}:
        return signal.Signals(number).name
    return f"signal {number}"


def _cause(end: RankExit) -> RootCause:
    cause: RootCause = {
        "rank": end.rank,
        "host": end.host,
        "code": end.code,
        "log": end.log,
        "time": utc_text(end.time),
        "last": list(end.last),
    }
    if end.error:
        error = end.error
        # a rank's own file: anything may stand there
        code = error.get("exit")
        kind = error.get("type")
        step = error.get("step")
        return cause | {
            "exit": code if isinstance(code, int) else int(Exit.RANK_USER),
            "type": printable(kind) if isinstance(kind, str) else None,
            "message": printable(str(error.get("message"))),
            "step": step if isinstance(step, int) else None,
        }
    if end.code < 0:
        name = signal_name(-end.code)
        why = " (killed by the kernel: out of memory)" if end.oom else ""
        return cause | {
            "exit": int(Exit.RANK_INFRA),
            "signal": name,
            "message": f"ended by {name}{why}",
        }
    return cause | {
        "exit": int(Exit.RANK_USER),
        "message": f"exited with {end.code} and wrote no error",
    }


def _is_echo(cause: RootCause) -> bool:
    """Whether a rank only says that a peer of its own is gone."""
    message = str(cause.get("message", ""))
    connection_lost = cause.get("type") == "RuntimeError" and any(
        word in message for word in PEER_WORDS
    )
    aborted = cause.get("signal") == "SIGABRT" and any(
        "ProcessGroup" in line or "gloo::" in line for line in cause.get("last", ())
    )
    return connection_lost or aborted or cause.get("type") in PEER_TYPES


@dataclass(frozen=True)
class _Failure:
    """A rank that left without having done its work, and what it says of that."""

    time: float
    cause: RootCause


@dataclass(frozen=True)
class _Evidence:
    """What is known once every rank has ended or cannot be heard any more; arguments as of
    judge_outcome."""

    ends: Sequence[RankExit]
    world_size: int
    requested: StopRequest | None
    lost: Sequence[LostContact]
    rules: FailureRules

    @cached_property
    def unfinished(self) -> list[RankExit]:
        """Ranks that left by themselves without recording success, the first leaver first."""
        left = [end for end in self.ends if not end.stopped and not end.done]
        return sorted(left, key=lambda end: end.time)

    @cached_property
    def failures(self) -> list[_Failure]:
        """Ranks that left with a code that nobody asked for."""
        expected = {0, int(Exit.PREEMPTED)}
        if self.requested:
            # USR1 ends a rank that has not got so far as to wait for it
            expected.add(-signal.SIGUSR1)
        return [
            _Failure(end.time, _cause(end)) for end in self.unfinished if end.code not in expected
        ]

    @cached_property
    def first_failure(self) -> _Failure | None:
        """The first that is not an echo of a peer's end. Without a request to stop, exit code 0
        is a failure too where no success was recorded."""
        own = [failure for failure in self.failures if not _is_echo(failure.cause)]
        if self.requested is None:
            own += [
                _Failure(end.time, {**_cause(end), **SILENT_EXIT})
                for end in self.unfinished
                if end.code == 0
            ]
        return min(own, key=lambda failure: failure.time, default=None)

    @cached_property
    def leavers(self) -> list[RankExit]:
        """Ranks that were asked, by us or by somebody else's signal, to save and leave."""
        return [end for end in self.unfinished if end.code == int(Exit.PREEMPTED)]

    @property
    def all_saved(self) -> bool:
        """Whether every rank left as one does that has saved."""
        return len(self.ends) == self.world_size and all(
            end.code == int(Exit.PREEMPTED) or end.done for end in self.ends
        )


def _judge_success(evidence: _Evidence) -> Outcome | None:
    """Success is every rank's own record, written before teardown: a rank that aborts in
    teardown after that has not failed."""
    if 0 < evidence.world_size == len(evidence.ends) and all(end.done for end in evidence.ends):
        return Outcome(Exit.DONE, "success", None)
    return None


def _judge_lost_contact(evidence: _Evidence) -> Outcome | None:
    """A host that was lost before any rank failed: what its peers say follows from that."""
    gone = min(evidence.lost, key=lambda contact: contact.time, default=None)
    first = evidence.first_failure
    if gone is None or (first is not None and first.time <= gone.time):
        return None
    code = Exit.CONTACT_LOST if gone.silent else Exit.RANK_INFRA
    cause: RootCause = {
        "host": gone.host,
        "message": f"contact with {gone.host} was lost: {gone.why}",
        "time": utc_text(gone.time),
        "exit": int(code),
        "class": "infra",
        "advice": (
            f"look whether {gone.host} is up and reachable; it stops its ranks by itself when it"
            " hears nothing of the supervisor"
        ),
    }
    return Outcome(code, "infra", cause, (gone.host,))


def _judge_failed_rank(evidence: _Evidence) -> Outcome | None:
    """The first failure by the supervisor's clock, whatever its exit code; an echo only where
    there is nothing else."""
    if evidence.first_failure is not None:
        return _of_rank(evidence.first_failure.cause, evidence.rules)
    # where one was asked to stop and left, the others' broken connections are not failures
    if evidence.failures and not evidence.leavers:
        return _of_rank(evidence.failures[0].cause, evidence.rules)
    return None


def _judge_cancelled(evidence: _Evidence) -> Outcome | None:
    """A person stopped the run."""
    if evidence.requested == StopRequest.INTERRUPT:
        return Outcome(Exit.INTERRUPTED, "cancelled", {"message": "stopped by Ctrl-C"})
    if evidence.requested == StopRequest.CANCEL:
        return Outcome(Exit.CANCELLED, "cancelled", {"message": "stopped by invoke cancel"})
    return None


def _judge_preempted(evidence: _Evidence) -> Outcome | None:
    """Ranks were asked to save and leave, by us or by a signal that somebody else sent."""
    if not evidence.requested and not evidence.leavers:
        return None
    saved = evidence.all_saved
    if evidence.requested:
        message = "asked to save and stop"
    else:
        message = "a rank was asked to save and stop"
    if not saved:
        message += "; it was stopped before all ranks had saved"
    if saved or evidence.requested:
        return Outcome(Exit.PREEMPTED, "preempted", {"message": message, "saved": saved})
    first = evidence.leavers[0]
    message = (
        f"rank {first.rank} was asked by a signal to save and stop, and left before its peers had"
        " saved"
    )
    cause: RootCause = {**_cause(first), "message": message, "saved": saved}
    return Outcome(Exit.PREEMPTED, "preempted", cause)


# in this order: the first that knows the outcome decides
JUDGEMENTS: tuple[Callable[[_Evidence], Outcome | None], ...] = (
    _judge_success,
    _judge_lost_contact,
    _judge_failed_rank,
    _judge_cancelled,
    _judge_preempted,
)


def judge_outcome(
    ends: Sequence[RankExit],
    world_size: int,
    requested: StopRequest | None,
    lost: Sequence[LostContact] = (),
    rules: FailureRules = FailureRules({}),  # noqa: B008 (frozen and empty)
) -> Outcome:
    """The attempt's outcome once every rank has ended or cannot be heard any more.

    Args:
        ends: how ranks' processes ended.
        world_size: how many ranks there are.
        requested: what asked the supervisor to stop, if anything did.
        lost: agents that are heard no more.
        rules: what failures mean.
    """
    evidence = _Evidence(ends, world_size, requested, lost, rules)
    known = (outcome for judge in JUDGEMENTS if (outcome := judge(evidence)) is not None)
    message = "a rank ended without recording success"
    return next(known, Outcome(Exit.RANK_INFRA, "infra", {"message": message}))


def _of_rank(cause: RootCause, rules: FailureRules) -> Outcome:
    """The outcome of a rank's failure: the first rule that fits refines class and exit code."""
    known = cause["exit"] in {each.value for each in Exit}
    code = Exit(cause["exit"]) if known else Exit.RANK_USER
    infra = code == Exit.RANK_INFRA or _is_echo(cause)
    failure_class: FailureClass = "infra" if infra else "user"
    rule = None
    if code in REFINED:
        rule = rules.find(_description(cause), cause["last"])
    suspects: tuple[str, ...] = ()
    if rule is not None:
        failure_class = rule.failure_class
        cause["advice"] = rule.advice
        if rule.suspect:
            suspects = (cause["host"],)
    exit = _EXIT_OF_CLASS.get(failure_class, Exit.RANK_USER if infra else code)
    cause["exit"] = int(exit)
    cause["class"] = failure_class
    return Outcome(exit, failure_class, cause, suspects)


def _description(cause: RootCause) -> str:
    """What a rank said of its failure, in one line."""
    if cause.get("type"):
        return f"{cause['type']}: {cause['message']}"
    return cause["message"]
