"""Why an attempt ended: exit class and root cause from the ranks' exit codes and error files,
and from lost contacts."""

from __future__ import annotations

import datetime
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.printable import printable
from trainkit.launch.supervise.failure_rules import FailureRules
from trainkit.runs.record import FailureClass

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
# codes that rules may refine; others are a rank's own precise word
JUDGED = (Exit.RANK_USER, Exit.RANK_INFRA)
WENT_SILENTLY = {
    "exit": int(Exit.RANK_INFRA),
    "message": "exited with 0 and had not said that it was done",
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
    error: Mapping[str, Any] | None = None
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
    root_cause: dict[str, Any] | None
    suspects: tuple[str, ...] = field(default=())


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 77" for one that Python does not know."""
    if number in {s.value for s in signal.Signals}:
        return signal.Signals(number).name
    return f"signal {number}"


def iso(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC."""
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _cause(end: RankExit) -> dict[str, Any]:
    cause: dict[str, Any] = {
        "rank": end.rank,
        "host": end.host,
        "code": end.code,
        "log": end.log,
        "time": iso(end.time),
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
        if end.oom:
            why = " (killed by the kernel: out of memory)"
        else:
            why = ""
        return cause | {
            "exit": int(Exit.RANK_INFRA),
            "signal": name,
            "message": f"ended by {name}{why}",
        }
    return cause | {
        "exit": int(Exit.RANK_USER),
        "message": f"exited with {end.code} and wrote no error",
    }


def _is_echo(cause: Mapping[str, Any]) -> bool:
    of_gloo = cause.get("type") == "RuntimeError" and any(
        word in str(cause.get("message", "")) for word in PEER_WORDS
    )
    aborted = cause.get("signal") == "SIGABRT" and any(
        "ProcessGroup" in line or "gloo::" in line for line in cause.get("last", ())
    )
    return of_gloo or aborted or cause.get("type") in PEER_TYPES


def judge_outcome(
    ends: Sequence[RankExit],
    world_size: int,
    asked: StopRequest | None,
    lost: Sequence[LostContact] = (),
    rules: FailureRules = FailureRules({}),  # noqa: B008 (frozen and empty)
) -> Outcome:
    """The attempt's outcome once every rank has ended or cannot be heard any more. `asked`: what
    told the supervisor to stop, if anything did.

    Success is every rank's own word, written before teardown; a rank that aborts in teardown
    after that has not failed. The root cause is the first that left without having done its
    work, by the supervisor's clock, whatever its exit code; an echo of a peer's end only where
    there is nothing else.
    """
    if 0 < world_size == len(ends) and all(end.done for end in ends):
        return Outcome(Exit.DONE, "success", None)
    # USR1 ends a rank that has not got so far as to wait for it
    expected = {0, int(Exit.PREEMPTED)} | ({-signal.SIGUSR1} if asked else set())
    unfinished = sorted(
        (end for end in ends if not end.stopped and not end.done), key=lambda end: end.time
    )
    causes = [(end.time, _cause(end)) for end in unfinished if end.code not in expected]
    own = [(time, cause) for time, cause in causes if not _is_echo(cause)]
    if asked is None:
        own += [(end.time, _cause(end) | WENT_SILENTLY) for end in unfinished if end.code == 0]
    first = min(own, key=lambda pair: pair[0], default=None)
    gone = min(lost, key=lambda contact: contact.time, default=None)
    if gone is not None and (first is None or gone.time < first[0]):
        return _of_lost(gone)
    leavers = [end for end in unfinished if end.code == int(Exit.PREEMPTED)]
    # where one was told to stop and left, the others' broken connections are no failure
    if (causes or first) and not (leavers and first is None):
        return _of_rank(first[1] if first else causes[0][1], rules)
    if asked == StopRequest.INTERRUPT:
        return Outcome(Exit.INTERRUPTED, "cancelled", {"message": "stopped by Ctrl-C"})
    if asked == StopRequest.CANCEL:
        return Outcome(Exit.CANCELLED, "cancelled", {"message": "stopped by invoke cancel"})
    if asked or leavers:
        return _of_left(
            leavers,
            asked,
            saved=len(ends) == world_size
            and all(end.code == int(Exit.PREEMPTED) or end.done for end in ends),
        )
    return Outcome(Exit.RANK_INFRA, "infra", {"message": "a rank ended without recording success"})


def _of_left(leavers: Sequence[RankExit], asked: StopRequest | None, *, saved: bool) -> Outcome:
    """Ranks were told to save and leave, by us or by a signal that somebody else sent."""
    cause: dict[str, Any] = {
        "message": "told to save and stop" if asked else "a rank was told to save and stop",
        "saved": saved,
    }
    if not saved:
        cause["message"] += "; it was stopped before all ranks had saved"
    if leavers and not asked and not saved:
        first = leavers[0]
        cause = (
            _cause(first)
            | cause
            | {
                "message": (
                    f"rank {first.rank} was told by a signal to save and stop, and left before its"
                    " peers had saved"
                )
            }
        )
    return Outcome(Exit.PREEMPTED, "preempted", cause)


def _of_lost(gone: LostContact) -> Outcome:
    if gone.silent:
        code = Exit.CONTACT_LOST
    else:
        code = Exit.RANK_INFRA
    cause = {
        "host": gone.host,
        "message": f"contact with {gone.host} was lost: {gone.why}",
        "time": iso(gone.time),
        "exit": int(code),
        "class": "infra",
    }
    cause["advice"] = (
        f"look whether {gone.host} is up and reachable; it stops its ranks by itself when it hears"
        " nothing of the supervisor"
    )
    return Outcome(code, "infra", cause, (gone.host,))


def _of_rank(cause: dict[str, Any], rules: FailureRules) -> Outcome:
    if cause["exit"] in {e.value for e in Exit}:
        code = Exit(cause["exit"])
    else:
        code = Exit.RANK_USER
    infra = code == Exit.RANK_INFRA or _is_echo(cause)
    failure_class: FailureClass
    if infra:
        failure_class = "infra"
    else:
        failure_class = "user"
    if cause.get("type"):
        said = f"{cause['type']}: {cause['message']}"
    else:
        said = str(cause["message"])
    if code in JUDGED:
        rule = rules.find(said, cause["last"])
    else:
        rule = None
    if rule is not None:
        failure_class = rule.failure_class
        cause["advice"] = rule.advice
    exit = _EXIT_OF_CLASS.get(failure_class, Exit.RANK_USER if infra else code)
    suspects = (str(cause["host"]),) if rule is not None and rule.suspect else ()
    return Outcome(
        exit, failure_class, cause | {"exit": int(exit), "class": failure_class}, suspects
    )
