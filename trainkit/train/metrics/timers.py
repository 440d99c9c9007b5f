"""What a step's time goes into, by phase, without ever waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections import deque
from types import TracebackType
from typing import Literal, get_args

import torch

from trainkit.base.lazy_dataclasses import dataclass

Phase = Literal[
    "data",
    "forward",
    "backward",
    "pipeline",
    "communication",
    "optimizer",
    "evaluation",
    "checkpoint",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
LAST: Phase = "optimizer"  # the phase that ends a step
COMPUTING = ("forward", "backward")


@dataclass
class _Span:
    """One stretch of a phase: seconds of the host's clock, or two events in the device's queue.
    `own`: seconds of it that this thread had a CPU."""

    phase: Phase
    start: float | torch.cuda.Event
    own: float
    end: float | torch.cuda.Event | None = None

    def milliseconds(self) -> float:
        if isinstance(self.start, torch.cuda.Event):
            assert isinstance(self.end, torch.cuda.Event)
            return float(self.start.elapsed_time(self.end))
        assert isinstance(self.end, float)
        return 1000 * (self.end - self.start)


class _Timing:
    """The `with` block of one phase."""

    def __init__(self, timers: Timers, phase: Phase) -> None:
        self.timers = timers
        self.phase = phase

    def __enter__(self) -> None:
        self.timers.begin(self.phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.timers.end()


class Timers:
    """Times phases of training on one rank: `with timers("forward"): ...`.

    On the CPU by the host's clock. On CUDA by events in the device's queue: a phase is the time
    between the device's reaching its beginning and its end, so work of the host that the device
    does not wait for (data, as a rule) counts as nothing.

    `own_ms`: of the steps taken last, in the median, what this rank computed of forward and
    backward itself. On the CPU that is the time of a CPU, so waiting for other ranks is not in it,
    nor is what this rank's other threads do; on CUDA it is all of both phases.

    A phase is not begun within another. Every step ends with one phase `optimizer`; an
    evaluation or a checkpoint counts with the step after it.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: deque[_Span] = deque()
        self._open: _Span | None = None
        self.data_seconds = 0.0  # waited for data so far; on CUDA by the steps that were taken
        # waited for checkpoints so far; on CUDA no step waits for one
        self.checkpoint_seconds = 0.0
        self.own_ms = 0.0

    def __call__(self, phase: Phase) -> _Timing:
        return _Timing(self, phase)

    def _now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin(self, phase: Phase) -> None:
        """Raises RuntimeError within another phase."""
        if self._open is not None:
            raise RuntimeError(f"phase {phase!r} begins within phase {self._open.phase!r}")
        self._open = _Span(phase, self._now(), -time.thread_time())

    def end(self) -> None:
        """The end of the phase that was begun last."""
        assert self._open is not None
        self._open.end = self._now()
        self._open.own += time.thread_time()
        if not self.cuda and self._open.phase == "data":
            self.data_seconds += self._open.milliseconds() / 1000
        if not self.cuda and self._open.phase == "checkpoint":
            self.checkpoint_seconds += self._open.milliseconds() / 1000
        self._spans.append(self._open)
        self._open = None

    def take(self, steps: int) -> dict[str, float]:
        """Milliseconds a step by phase, mean over the oldest `steps` steps, which are forgotten.
        Phases that did not happen are left out.

        Call it for steps whose results have reached the host: on CUDA it would wait for others.
        """
        total: dict[Phase, float] = {}
        own = [0.0]  # of every step
        while self._spans and len(own) <= steps:
            span = self._spans.popleft()
            milliseconds = span.milliseconds()
            total[span.phase] = total.get(span.phase, 0.0) + milliseconds
            if span.phase in COMPUTING:
                own[-1] += milliseconds if self.cuda else 1000 * span.own
            if span.phase == LAST:
                own.append(0.0)
        self.own_ms = statistics.median(own[:-1] or [0.0])
        if self.cuda:
            self.data_seconds += total.get("data", 0.0) / 1000
        return {phase: total[phase] / steps for phase in PHASES if phase in total}

    def forget(self) -> None:
        """Drop what was not taken: those steps are undone."""
        self._spans.clear()
        self._open = None
