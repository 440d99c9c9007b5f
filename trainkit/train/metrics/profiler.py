"""torch's profiler over a range of steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainkit.base.files import temporary_name, write_text
from trainkit.jobs.schema import ProfileSettings

TOP = 40  # rows of the table


class StepProfiler:
    """Profiles the steps that a job asks for, and writes `rank-0-step-10-12.json.gz`, a Chrome
    trace, and a table of the costliest operations, `.txt`.

    Args:
        profile: which steps of which ranks; None: nothing is profiled.
        rank: this rank.
        folder: where the files go.
    """

    def __init__(self, profile: ProfileSettings | None, rank: int, folder: Path) -> None:
        self.profile = profile if profile and rank in profile.ranks else None
        self.rank = rank
        self.folder = folder
        self._running: torch.profiler.profile | None = None
        self._steps: list[int] = []

    @property
    def running(self) -> bool:
        """Whether the step that was begun is profiled: it takes longer, to write it down too."""
        return self._running is not None

    def before(self, step: int) -> None:
        """Call before a step begins. One outside the range ends a profile that still runs:
        training went back to an earlier step."""
        if self.profile is None:
            return
        inside = self.profile.start <= step <= self.profile.stop
        if self._running and not inside:
            self.close()
        if inside and not self._running:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = torch.profiler.profile(
                activities=[ProfilerActivity.CPU, *cuda], record_shapes=True
            )
            self._running.start()

    def after(self, step: int) -> float:
        """Call after a step was set going. Returns the seconds it took to write the profile
        down, if it has ended: no part of training's time."""
        if self.profile is None or not self._running:
            return 0.0
        self._steps.append(step)
        began = time.perf_counter()
        if step >= self.profile.stop:
            self.close()
        return time.perf_counter() - began

    def close(self) -> None:
        """Write down what was profiled so far, if anything. Waits for the device."""
        running = self._running
        steps = self._steps
        self._running = None
        self._steps = []
        if running is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running.stop()
        if not steps:
            return
        name = f"rank-{self.rank}-step-{min(steps)}-{max(steps)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}.json.gz"
        # torch compresses what ends like this
        temporary = trace.with_name(f"{temporary_name(trace).name}.gz")
        running.export_chrome_trace(str(temporary))
        os.replace(temporary, trace)
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        write_text(
            self.folder / f"{name}.txt",
            running.key_averages().table(sort_by=by, row_limit=TOP) + "\n",
        )
