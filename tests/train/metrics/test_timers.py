"""Phases are timed by step, and steps that are not finished are not waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainkit.train.metrics.timers import LAST, PHASES, Phase, Timers

CPU = torch.device("cpu")


class Clock:
    """A clock that a test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(
            "trainkit.train.metrics.timers.time",
            SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now),
        )

    def spend(self, timers: Timers, phase: Phase, seconds: float) -> None:
        with timers(phase):
            self.now += seconds
        self.now += 1000.0  # between phases nothing is counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_mean_of_the_steps_that_are_asked_for(clock: Clock) -> None:
    timers = Timers(CPU)
    for step in (1, 2, 3):
        for _ in range(2):  # micro-batches
            clock.spend(timers, "forward", 0.010 * step)
            clock.spend(timers, "backward", 0.020 * step)
        clock.spend(timers, "optimizer", 0.001)
        if step == 2:
            clock.spend(timers, "evaluation", 0.5)
    assert timers.take(2) == pytest.approx({"forward": 30.0, "backward": 60.0, "optimizer": 1.0})
    third = timers.take(1)
    # the evaluation came after step 2
    assert third == pytest.approx(
        {"forward": 60.0, "backward": 120.0, "optimizer": 1.0, "evaluation": 500.0}
    )
    assert list(third) == ["forward", "backward", "optimizer", "evaluation"]
    assert timers.take(1) == {}


def test_steps_that_are_undone_are_forgotten(clock: Clock) -> None:
    timers = Timers(CPU)
    clock.spend(timers, "optimizer", 9.0)
    timers.begin("forward")
    timers.forget()
    clock.spend(timers, "optimizer", 0.002)
    assert timers.take(1) == pytest.approx({"optimizer": 2.0})


def test_a_phase_ends_with_its_block_whatever_happens(clock: Clock) -> None:
    timers = Timers(CPU)
    with pytest.raises(KeyError), timers("data"):
        clock.now += 0.004
        raise KeyError
    clock.spend(timers, "optimizer", 0.0)
    assert timers.take(1) == pytest.approx({"data": 4.0, "optimizer": 0.0})


def test_no_phase_within_another() -> None:
    timers = Timers(CPU)
    with (
        timers("forward"),
        pytest.raises(RuntimeError, match="'data' begins within phase 'forward'"),
    ):
        timers.begin("data")


class Event:
    """An event of a device that has not come further than `done`."""

    queued, done = 0, 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.queued += 1
        self.place = Event.queued

    def elapsed_time(self, end: Event) -> float:
        assert max(self.place, end.place) <= Event.done, "this would wait for the device"
        return 10.0 * (end.place - self.place)


def test_events_are_read_of_finished_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "queued", 0)
    timers = Timers(torch.device("cuda", 0))
    for _ in range(2):
        for phase in PHASES[1], LAST:
            with timers(phase):
                pass
    monkeypatch.setattr(Event, "done", 4)  # the first step is through, the second is not
    assert timers.take(1) == {"forward": 10.0, "optimizer": 10.0}
    monkeypatch.setattr(Event, "done", 8)
    assert timers.take(1) == {"forward": 10.0, "optimizer": 10.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_the_device_is_timed_and_not_waited_for() -> None:
    timers = Timers(torch.device("cuda", 0))
    product = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.set_sync_debug_mode("error")  # torch raises where the host waits
    try:
        began.record()
        with timers("forward"):
            for _ in range(20):
                product = product @ product
        ended.record()
        with timers("optimizer"):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    taken = timers.take(1)
    assert (
        taken["forward"] == pytest.approx(began.elapsed_time(ended), rel=0.1)
        and taken["optimizer"] < taken["forward"]
    )
