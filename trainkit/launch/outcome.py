"""Why an attempt ended: exit class and root cause from the ranks' exit codes and error files."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.files import read_json
from trainkit.runs.folder import AttemptFolder
from trainkit.runs.record import FailureClass

# What a rank says when a peer died under it: never the root cause while another rank says something else.
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


@dataclass(frozen=True)
class RankEnd:
    """How one rank's process ended. `code` is negative for a signal; `stopped`: we ended it ourselves."""

    rank: int
    host: str
    code: int
    time: float
    stopped: bool


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    exit: Exit
    failure_class: FailureClass
    root_cause: dict[str, Any] | None


def said_done(attempt: AttemptFolder, rank: int) -> bool:
    """Whether the rank recorded success before its teardown."""
    try:
        return bool(read_json(attempt.heartbeat(rank)).get("phase") == "done")
    except (OSError, ValueError, AttributeError):
        return False


def _error_of(attempt: AttemptFolder, end: RankEnd) -> dict[str, Any]:
    try:
        value = read_json(attempt.error(end.rank))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _cause(attempt: AttemptFolder, end: RankEnd) -> dict[str, Any]:
    error = _error_of(attempt, end)
    cause: dict[str, Any] = {"rank": end.rank, "host": end.host, "code": end.code, "log": str(attempt.log(end.rank))}
    if error:
        return cause | {"exit": error.get("exit", int(Exit.RANK_USER)), "type": error.get("type"), "message": error.get("message"), "step": error.get("step")}
    if end.code < 0:
        name = signal.Signals(-end.code).name if -end.code in {s.value for s in signal.Signals} else f"signal {-end.code}"
        return cause | {"exit": int(Exit.RANK_INFRA), "signal": name, "message": f"ended by {name}"}
    return cause | {"exit": int(Exit.RANK_USER), "message": f"exited with {end.code} and wrote no error"}


def _is_echo(cause: dict[str, Any]) -> bool:
    of_gloo = cause.get("type") == "RuntimeError" and any(word in str(cause.get("message", "")) for word in PEER_WORDS)
    return of_gloo or cause.get("type") in PEER_TYPES


def judge_outcome(attempt: AttemptFolder, ends: list[RankEnd], world_size: int, asked: signal.Signals | None) -> Outcome:
    """The attempt's outcome once every rank has ended. `asked`: the signal that told the supervisor to stop, if any.

    Success is every rank's own word, written before teardown; a rank that aborts in teardown after that has not failed.
    The root cause is the first failure that is no echo of a peer's death.
    """
    if len(ends) == world_size and all(said_done(attempt, end.rank) for end in ends):
        return Outcome(Exit.DONE, "success", None)
    expected = {0, int(Exit.PREEMPTED)} | ({-signal.SIGUSR1} if asked else set())  # USR1 ends a rank that has not got so far as to wait for it
    failed = [end for end in ends if not end.stopped and end.code not in expected and not said_done(attempt, end.rank)]
    if failed:
        causes = [_cause(attempt, end) for end in sorted(failed, key=lambda end: end.time)]
        cause = next((c for c in causes if not _is_echo(c)), causes[0])
        code = Exit(cause["exit"]) if cause["exit"] in {e.value for e in Exit} else Exit.RANK_USER
        infra = code == Exit.RANK_INFRA or _is_echo(cause)
        return Outcome(Exit.RANK_INFRA if infra else code, "infra" if infra else "user", cause)
    if asked == signal.SIGINT:
        return Outcome(Exit.INTERRUPTED, "cancelled", {"message": "stopped by Ctrl-C"})
    if asked or any(end.code == int(Exit.PREEMPTED) for end in ends):
        return Outcome(Exit.PREEMPTED, "preempted", {"message": f"told to stop by {asked.name}" if asked else "a rank was told to save and stop"})
    return Outcome(Exit.RANK_INFRA, "infra", {"message": "a rank ended without recording success"})
