"""Who of several killed processes the kernel killed for want of memory."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.launch.agent import oom
from trainkit.launch.agent.oom import OomDetector


def child(pid: int, code: int = -signal.SIGKILL, *, stopped: bool = False) -> Any:
    return SimpleNamespace(pid=pid, code=code, stopped=stopped, began=0.0)


def kernel(monkeypatch: pytest.MonkeyPatch, kills: int, named: set[int]) -> None:
    monkeypatch.setattr(oom, "_oom_kills", lambda: kills)
    monkeypatch.setattr(oom, "_killed_pids", lambda since: named)


@pytest.mark.parametrize("first", [0, 1])
def test_a_kill_that_the_log_gives_to_another_is_not_ones_own(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """In whichever order the two ends are reported."""
    kernel(monkeypatch, 0, set())
    detector = OomDetector()
    both = [child(10), child(11)]
    kernel(monkeypatch, 1, {10})
    left = list(both)
    found = {}
    for each in (both[first], both[1 - first]):
        found[each.pid] = detector.killed(each, left)
        left.remove(each)
    assert found == {10: True, 11: False}


def test_a_count_without_a_log_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the log is not to be read, or has pids of the host."""
    kernel(monkeypatch, 3, set())
    detector = OomDetector()
    kernel(monkeypatch, 4, {9999})
    both = [child(10), child(11)]
    assert detector.killed(both[0], both)
    assert not detector.killed(both[1], both[1:])


def test_what_we_killed_or_what_ended_otherwise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(monkeypatch, 0, set())
    detector = OomDetector()
    kernel(monkeypatch, 1, {10, 11})
    assert not detector.killed(child(10, stopped=True), [])
    assert not detector.killed(child(11, code=1), [])
