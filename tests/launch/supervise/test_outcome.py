"""Exit classes and root causes from what ranks leave behind."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from trainkit.base.errors import Exit
from trainkit.jobs.clusters import Cluster, FailureRule
from trainkit.launch.supervise.failure_rules import BUILT_IN, FailureRules, load_failure_rules
from trainkit.launch.supervise.outcome import LostContact, RankExit, StopRequest, judge_outcome

RULES = load_failure_rules(Cluster())


class Told:
    """What ranks said before they ended."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.errors: dict[int, dict[str, Any]] = {}


@pytest.fixture
def attempt() -> Told:
    return Told()


def ends(*codes: int, stopped: tuple[int, ...] = ()) -> list[RankExit]:
    return [
        RankExit(rank, "h", code, float(rank), rank in stopped) for rank, code in enumerate(codes)
    ]


def done(attempt: Told, *ranks: int) -> None:
    attempt.done |= set(ranks)


def error(attempt: Told, rank: int, **values: Any) -> None:
    attempt.errors[rank] = {"schema": "rank-error/1", "rank": rank, **values}


def judged(
    attempt: Told, found: list[RankExit], asked: StopRequest | None = None
) -> tuple[int, str, Any]:
    told = [
        replace(end, done=end.rank in attempt.done, error=attempt.errors.get(end.rank))
        for end in found
    ]
    outcome = judge_outcome(told, len(told), asked, (), RULES)
    return int(outcome.exit), outcome.failure_class, (outcome.root_cause or {}).get("rank")


def test_success_is_every_ranks_own_word(attempt: Told) -> None:
    done(attempt, 0, 1)
    assert judged(attempt, ends(0, 0)) == (0, "success", None)


def test_an_abort_in_teardown_after_success_is_no_failure(attempt: Told) -> None:
    done(attempt, 0, 1)
    assert judged(attempt, ends(0, -signal.SIGABRT)) == (0, "success", None)
    assert judged(attempt, ends(0, -signal.SIGKILL, stopped=(1,))) == (0, "success", None)


def test_exit_0_without_a_word_is_not_success(attempt: Told) -> None:
    done(attempt, 0)
    assert judged(attempt, ends(0, 0))[:2] == (int(Exit.RANK_INFRA), "infra")


def test_the_first_leaver_is_the_cause_whatever_its_code(attempt: Told) -> None:
    error(
        attempt,
        1,
        type="RuntimeError",
        message="[../gloo/transport/tcp/pair.cc] Connection closed by peer",
        exit=9,
    )
    assert judged(attempt, ends(0, 9)) == (10, "infra", 0), "not the peer that its leaving broke"
    assert judged(attempt, ends(0, -signal.SIGKILL)) == (
        10,
        "infra",
        0,
    ), "not one that was killed later"
    assert judged(attempt, ends(12, 9)) == (12, "preempted", 0)
    error(attempt, 0, type="ValueError", message="mine", exit=9)
    assert judged(attempt, ends(9, 0)) == (9, "user", 0)


def test_users_exception_is_told_from_its_echo(attempt: Told) -> None:
    error(
        attempt,
        0,
        type="RuntimeError",
        message="[../gloo/transport/tcp/pair.cc] Connection closed by peer",
        exit=9,
    )
    error(attempt, 1, message="division by zero", exit=9)
    assert judged(attempt, ends(9, 9)) == (9, "user", 1)


def test_a_signal_nobody_of_us_sent_is_infrastructure(attempt: Told) -> None:
    error(attempt, 0, type="DistNetworkError", message="Connection reset by peer", exit=9)
    assert judged(attempt, ends(9, -signal.SIGKILL)) == (10, "infra", 1)
    assert judged(attempt, ends(-signal.SIGSEGV, -signal.SIGTERM, stopped=(1,))) == (10, "infra", 0)


def test_only_echoes_is_infrastructure(attempt: Told) -> None:
    error(attempt, 0, type="RuntimeError", message="Connection closed by peer", exit=9)
    assert judged(attempt, ends(9, -signal.SIGKILL, stopped=(1,))) == (10, "infra", 0)


def test_a_ranks_own_exit_code_is_kept(attempt: Told) -> None:
    error(attempt, 0, message="no valid checkpoint", exit=16)
    assert judged(attempt, ends(16, 16))[:2] == (16, "user")
    assert judged(attempt, ends(3, -signal.SIGKILL, stopped=(1,)))[0] == 16


def test_an_unknown_exit_code_is_the_users(attempt: Told) -> None:
    assert judged(attempt, ends(77, 0)) == (9, "user", 0)


def test_saved_on_request(attempt: Told) -> None:
    assert judged(attempt, ends(12, 12)) == (12, "preempted", None)
    assert judged(attempt, ends(12, 12), StopRequest.SAVE) == (12, "preempted", None)
    assert judged(
        attempt, ends(-signal.SIGKILL, -signal.SIGKILL, stopped=(0, 1)), StopRequest.CANCEL
    ) == (
        15,
        "cancelled",
        None,
    )
    assert judged(attempt, ends(12, 12), StopRequest.INTERRUPT) == (130, "cancelled", None)
    assert judged(attempt, ends(-signal.SIGUSR1, -signal.SIGUSR1), StopRequest.INTERRUPT) == (
        130,
        "cancelled",
        None,
    )
    assert judged(
        attempt, ends(-signal.SIGKILL, -signal.SIGKILL, stopped=(0, 1)), StopRequest.INTERRUPT
    ) == (130, "cancelled", None)


def test_a_users_own_broken_connection_is_the_users(attempt: Told) -> None:
    error(
        attempt, 0, type="ConnectionRefusedError", message="[Errno 111] Connection refused", exit=9
    )
    assert judged(attempt, ends(9, -signal.SIGKILL, stopped=(1,))) == (9, "user", 0)


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
