"""Exit classes and root causes from what ranks leave behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import Exit
from trainkit.base.files import write_json
from trainkit.launch.outcome import RankEnd, judge_outcome
from trainkit.runs.folder import AttemptFolder


def ends(*codes: int, stopped: tuple[int, ...] = ()) -> list[RankEnd]:
    return [RankEnd(rank, "h", code, float(rank), rank in stopped) for rank, code in enumerate(codes)]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    return AttemptFolder(tmp_path / "1")


def done(attempt: AttemptFolder, *ranks: int) -> None:
    for rank in ranks:
        write_json(attempt.heartbeat(rank), {"phase": "done"})


def error(attempt: AttemptFolder, rank: int, **values: Any) -> None:
    write_json(attempt.error(rank), {"schema": "rank-error/1", "rank": rank, **values})


def judged(attempt: AttemptFolder, found: list[RankEnd], asked: signal.Signals | None = None) -> tuple[int, str, Any]:
    outcome = judge_outcome(attempt, found, len(found), asked)
    return int(outcome.exit), outcome.failure_class, (outcome.root_cause or {}).get("rank")


def test_success_is_every_ranks_own_word(attempt: AttemptFolder) -> None:
    done(attempt, 0, 1)
    assert judged(attempt, ends(0, 0)) == (0, "success", None)


def test_an_abort_in_teardown_after_success_is_no_failure(attempt: AttemptFolder) -> None:
    done(attempt, 0, 1)
    assert judged(attempt, ends(0, -signal.SIGABRT)) == (0, "success", None)
    assert judged(attempt, ends(0, -signal.SIGKILL, stopped=(1,))) == (0, "success", None)


def test_exit_0_without_a_word_is_not_success(attempt: AttemptFolder) -> None:
    done(attempt, 0)
    assert judged(attempt, ends(0, 0))[:2] == (int(Exit.RANK_INFRA), "infra")


def test_users_exception_is_told_from_its_echo(attempt: AttemptFolder) -> None:
    error(attempt, 0, type="RuntimeError", message="[../gloo/transport/tcp/pair.cc] Connection closed by peer", exit=9)
    error(attempt, 1, message="division by zero", exit=9)
    assert judged(attempt, ends(9, 9)) == (9, "user", 1)


def test_a_signal_nobody_of_us_sent_is_infrastructure(attempt: AttemptFolder) -> None:
    error(attempt, 0, type="DistNetworkError", message="Connection reset by peer", exit=9)
    assert judged(attempt, ends(9, -signal.SIGKILL)) == (10, "infra", 1)
    assert judged(attempt, ends(-signal.SIGSEGV, -signal.SIGTERM, stopped=(1,))) == (10, "infra", 0)


def test_only_echoes_is_infrastructure(attempt: AttemptFolder) -> None:
    error(attempt, 0, type="RuntimeError", message="Connection closed by peer", exit=9)
    assert judged(attempt, ends(9, -signal.SIGKILL, stopped=(1,))) == (10, "infra", 0)


def test_a_ranks_own_exit_code_is_kept(attempt: AttemptFolder) -> None:
    error(attempt, 0, message="no valid checkpoint", exit=16)
    assert judged(attempt, ends(16, 16))[:2] == (16, "user")
    assert judged(attempt, ends(3, -signal.SIGKILL, stopped=(1,)))[0] == 16


def test_an_unknown_exit_code_is_the_users(attempt: AttemptFolder) -> None:
    assert judged(attempt, ends(77, 0)) == (9, "user", 0)


def test_saved_on_request(attempt: AttemptFolder) -> None:
    assert judged(attempt, ends(12, 12)) == (12, "preempted", None)
    assert judged(attempt, ends(12, 12), signal.SIGTERM) == (12, "preempted", None)
    assert judged(attempt, ends(12, 12), signal.SIGINT) == (130, "cancelled", None)
    assert judged(attempt, ends(-signal.SIGUSR1, -signal.SIGUSR1), signal.SIGINT) == (130, "cancelled", None)
    assert judged(attempt, ends(-signal.SIGKILL, -signal.SIGKILL, stopped=(0, 1)), signal.SIGINT) == (130, "cancelled", None)


def test_a_users_own_broken_connection_is_the_users(attempt: AttemptFolder) -> None:
    error(attempt, 0, type="ConnectionRefusedError", message="[Errno 111] Connection refused", exit=9)
    assert judged(attempt, ends(9, -signal.SIGKILL, stopped=(1,))) == (9, "user", 0)
