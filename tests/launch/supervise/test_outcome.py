"""Exit classes and root causes from what ranks leave behind."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from trainkit.jobs.clusters import Cluster, FailureRule
from trainkit.launch.supervise.failure_rules import BUILT_IN, FailureRules, load_failure_rules
from trainkit.launch.supervise.outcome import LostContact, RankExit, StopRequest, judge_outcome

RULES = load_failure_rules(Cluster())


Said = dict[str, Any]
ECHO: Said = {
    "type": "RuntimeError",
    "message": "[../gloo/transport/tcp/pair.cc] Connection closed by peer",
    "exit": 9,
}
RESET: Said = {"type": "DistNetworkError", "message": "Connection reset by peer", "exit": 9}
REFUSED: Said = {
    "type": "ConnectionRefusedError",
    "message": "[Errno 111] Connection refused",
    "exit": 9,
}
MINE: Said = {"type": "ValueError", "message": "mine", "exit": 9}
DIVIDED: Said = {"message": "division by zero", "exit": 9}
NO_CHECKPOINT: Said = {"message": "no valid checkpoint", "exit": 16}
KILL, USR1 = -signal.SIGKILL, -signal.SIGUSR1


def left(
    rank: int, code: int, error: Said | None = None, *, done: bool = False, stopped: bool = False
) -> RankExit:
    """The end of a rank; they leave in the order of their numbers."""
    return RankExit(rank, "h", code, float(rank), stopped, done=done, error=error)


STOPPED = [left(0, KILL, stopped=True), left(1, KILL, stopped=True)]
SAVED = [left(0, 12), left(1, 12)]


@pytest.mark.parametrize(
    ("ends", "asked", "judged"),
    [
        # success is every rank's own word: an abort in teardown afterwards is not a failure
        ([left(0, 0, done=True), left(1, 0, done=True)], None, (0, "success", None)),
        ([left(0, 0, done=True), left(1, -6, done=True)], None, (0, "success", None)),
        (
            [left(0, 0, done=True), left(1, KILL, done=True, stopped=True)],
            None,
            (0, "success", None),
        ),
        # exit 0 without a word is none
        ([left(0, 0, done=True), left(1, 0)], None, (10, "infra", 1)),
        # the first leaver is the cause, whatever its code: not the peer that its leaving broke,
        # not one that was killed later
        ([left(0, 0), left(1, 9, ECHO)], None, (10, "infra", 0)),
        ([left(0, 0), left(1, KILL, ECHO)], None, (10, "infra", 0)),
        ([left(0, 12), left(1, 9, ECHO)], None, (12, "preempted", 0)),
        ([left(0, 9, MINE), left(1, 0, ECHO)], None, (9, "user", 0)),
        # a user's exception is told from its echo
        ([left(0, 9, ECHO), left(1, 9, DIVIDED)], None, (9, "user", 1)),
        # a signal that nobody of us sent is infrastructure, and so are echoes alone
        ([left(0, 9, RESET), left(1, KILL)], None, (10, "infra", 1)),
        ([left(0, -11), left(1, -15, stopped=True)], None, (10, "infra", 0)),
        ([left(0, 9, ECHO), left(1, KILL, stopped=True)], None, (10, "infra", 0)),
        # a rank's own exit code is kept; an unknown one is the user's
        ([left(0, 16, NO_CHECKPOINT), left(1, 16)], None, (16, "user", 0)),
        ([left(0, 3, NO_CHECKPOINT), left(1, KILL, stopped=True)], None, (16, "user", 0)),
        ([left(0, 77), left(1, 0)], None, (9, "user", 0)),
        # a user's own broken connection is the user's
        ([left(0, 9, REFUSED), left(1, KILL, stopped=True)], None, (9, "user", 0)),
        # saved, or stopped, as was asked
        (SAVED, None, (12, "preempted", None)),
        (SAVED, StopRequest.SAVE, (12, "preempted", None)),
        (STOPPED, StopRequest.CANCEL, (15, "cancelled", None)),
        (SAVED, StopRequest.INTERRUPT, (130, "cancelled", None)),
        ([left(0, USR1), left(1, USR1)], StopRequest.INTERRUPT, (130, "cancelled", None)),
        (STOPPED, StopRequest.INTERRUPT, (130, "cancelled", None)),
    ],
)
def test_an_end_is_judged(
    ends: list[RankExit], asked: StopRequest | None, judged: tuple[int, str, int | None]
) -> None:
    outcome = judge_outcome(ends, 2, asked, (), RULES)
    rank = (outcome.root_cause or {}).get("rank")
    assert (int(outcome.exit), outcome.failure_class, rank) == judged


def lost(host: str, time: float, *, silent: bool = False) -> LostContact:
    return LostContact(
        host,
        "its agent was silent for 15 s" if silent else "its agent's connection ended",
        time,
        silent,
    )


def test_a_lost_host_is_the_cause_of_what_follows() -> None:
    echo = {"type": "DistBackendError", "message": "Connection closed by peer", "exit": 9}
    peers = [RankExit(0, "a", 9, 5.0, False, error=echo)]
    outcome = judge_outcome(peers, 2, None, [lost("b", 6.0)], RULES)
    assert (outcome.exit, outcome.failure_class, outcome.suspects) == (10, "infra", ("b",)) and (
        outcome.root_cause or {}
    )["host"] == "b"
    assert judge_outcome(peers, 2, None, [lost("b", 6.0, silent=True)], RULES).exit == 13


def test_what_failed_before_the_host_was_lost_is_the_cause() -> None:
    failed = [
        RankExit(0, "a", 9, 5.0, False, error={"type": "ValueError", "message": "no", "exit": 9})
    ]
    assert (judge_outcome(failed, 2, None, [lost("b", 6.0)], RULES).root_cause or {})["rank"] == 0
    assert (judge_outcome(failed, 2, None, [lost("b", 4.0)], RULES).root_cause or {})["host"] == "b"


def test_the_root_cause_has_what_a_person_asks_for() -> None:
    end = RankExit(
        3,
        "n",
        9,
        0.5,
        False,
        error={"type": "ValueError", "message": "no", "exit": 9, "step": 7},
        last=["a", "b"],
        log="/l/3.log",
    )
    cause = judge_outcome([end], 1, None, (), RULES).root_cause
    assert cause is not None and {
        k: cause[k]
        for k in (
            "rank",
            "host",
            "code",
            "type",
            "message",
            "step",
            "log",
            "time",
            "last",
            "class",
            "exit",
        )
    } == {
        "rank": 3,
        "host": "n",
        "code": 9,
        "type": "ValueError",
        "message": "no",
        "step": 7,
        "log": "/l/3.log",
        "time": "1970-01-01T00:00:00.500Z",
        "last": ["a", "b"],
        "class": "user",
        "exit": 9,
    }


FAILURES = [
    (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2 GiB",
        "user",
        False,
        "micro_batch_size",
    ),
    (
        "RuntimeError",
        "CUDA error: uncorrectable ECC error encountered",
        "infra",
        True,
        "nvidia-smi",
    ),
    ("RuntimeError", "No CUDA GPUs are available", "infra", True, "nvidia-smi"),
    ("TrainkitError", "step 3: a silent fault of host n", "infra", True, "doctor"),
    (
        "TrainkitError",
        "step 3: a silent fault of one of the hosts n, m",
        "infra",
        False,
        "test each",
    ),
    (
        "DistBackendError",
        "NCCL error in: x.cpp, ncclSystemError: System call failed",
        "infra",
        False,
        "NCCL_DEBUG",
    ),
    (
        "DistNetworkError",
        (
            "The client socket has failed to connect to any network address of (a, 1): Connection"
            " refused"
        ),
        "infra",
        False,
        "firewall",
    ),
    ("OSError", "[Errno 28] No space left on device", "infra", False, "make room"),
    ("OSError", "[Errno 30] Read-only file system: '/x'", "infra", True, "file system"),
    ("ModuleNotFoundError", "No module named 'flash_attn'", "user", False, "prolog"),
    ("RuntimeError", "Watchdog caught collective operation timeout", "hang", False, "collective"),
    ("ValueError", "[Errno 5000] Connection refused by my own server", "user", False, None),
]


@pytest.mark.parametrize(("type_", "message", "failure_class", "suspect", "advice"), FAILURES)
def test_failures_that_people_meet(
    type_: str, message: str, failure_class: str, suspect: bool, advice: str | None
) -> None:
    outcome = judge_outcome(
        [RankExit(0, "h", 9, 1.0, False, error={"type": type_, "message": message, "exit": 9})],
        1,
        None,
        (),
        RULES,
    )
    assert outcome.failure_class == failure_class and outcome.suspects == (
        ("h",) if suspect else ()
    )
    assert int(outcome.exit) == {"user": 9, "infra": 10, "hang": 11}[failure_class]
    assert (
        (outcome.root_cause or {}).get("advice", None) is None
        if advice is None
        else advice in (outcome.root_cause or {})["advice"]
    )


@pytest.mark.parametrize(
    ("number", "oom", "word"),
    [
        (signal.SIGKILL, True, "memory was used up"),
        (signal.SIGKILL, False, "dmesg"),
        (signal.SIGSEGV, False, "native code"),
        (signal.SIGBUS, False, "/dev/shm"),
    ],
)
def test_signals_that_kill(number: signal.Signals, oom: bool, word: str) -> None:
    outcome = judge_outcome([RankExit(0, "h", -number, 1.0, False, oom=oom)], 1, None, (), RULES)
    assert (outcome.exit, outcome.failure_class) == (10, "infra") and word in (
        outcome.root_cause or {}
    )["advice"]


def test_the_last_lines_tell_where_the_rank_said_nothing() -> None:
    outcome = judge_outcome(
        [
            RankExit(
                0,
                "h",
                1,
                1.0,
                False,
                last=["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."],
            )
        ],
        1,
        None,
        (),
        RULES,
    )
    assert (outcome.exit, outcome.failure_class, outcome.suspects) == (10, "infra", ("h",))


def test_a_ranks_precise_word_is_not_overruled() -> None:
    said = {
        "type": "TrainkitError",
        "message": "no valid checkpoint: Input/output error",
        "exit": 16,
    }
    outcome = judge_outcome([RankExit(0, "h", 16, 1.0, False, error=said)], 1, None, (), RULES)
    assert (outcome.exit, outcome.failure_class, outcome.suspects) == (16, "user", ())


def test_a_clusters_own_rules_come_first() -> None:
    own = FailureRule(match="No CUDA GPUs", failure_class="user", advice="ours")
    rules = load_failure_rules(
        Cluster(
            failures={
                "gpu-not-there": own,
                "mine": FailureRule(match="zzz", failure_class="preempted", advice="reclaimed"),
            }
        )
    )
    gpu = [
        RankExit(
            0,
            "h",
            9,
            1.0,
            False,
            error={"type": "RuntimeError", "message": "No CUDA GPUs are available", "exit": 9},
        )
    ]
    outcome = judge_outcome(gpu, 1, None, (), rules)
    assert (outcome.failure_class, (outcome.root_cause or {})["advice"], outcome.suspects) == (
        "user",
        "ours",
        (),
    )
    reclaimed = judge_outcome(
        [RankExit(0, "h", 1, 1.0, False, last=["node zzz"])], 1, None, (), rules
    )
    assert (reclaimed.exit, reclaimed.failure_class) == (12, "preempted")


def test_the_built_in_rules_are_whole() -> None:
    assert (
        len(RULES.rules) > 10
        and all(rule.advice for rule in RULES.rules.values())
        and BUILT_IN.name.endswith(".toml")
    )
    assert FailureRules({}).find("anything", ["at all"]) is None


def test_broken_connections_of_the_peers_of_one_that_was_told_to_stop() -> None:
    echo = RankExit(
        1,
        "h",
        9,
        2.0,
        False,
        error={"exit": 9, "type": "RuntimeError", "message": "gloo: Connection closed by peer"},
    )
    told = judge_outcome([RankExit(0, "h", 12, 1.0, False), echo], 2, None)
    assert (int(told.exit), told.failure_class, (told.root_cause or {})["saved"]) == (
        12,
        "preempted",
        False,
    )
    own = RankExit(
        1, "h", 9, 2.0, False, error={"exit": 9, "type": "ValueError", "message": "mine"}
    )
    assert int(judge_outcome([RankExit(0, "h", 12, 1.0, False), own], 2, None).exit) == 9
