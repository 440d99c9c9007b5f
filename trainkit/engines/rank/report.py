"""What a rank of a foreign engine says of itself: its heartbeat, metrics.jsonl, and why it failed.

The forms are those of trainkit's own ranks: heartbeat/1, rank-error/1 and the rows of metrics.jsonl
(docs/run-folder.md). So is what the engine did when (trainkit/runs/phases.py), as far as its lines
tell: a line of training says how long its iterations took. Time between two lines that is none of
it was an evaluation where one was printed meanwhile, else a save. What the engine waits for data
is part of its iterations.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path

from trainkit.base.documents import document, utc_now
from trainkit.base.files import write_beat, write_json
from trainkit.engines.rank.end import Verdict
from trainkit.engines.rank.readings import EvaluationLine, Iteration
from trainkit.engines.rank.spec import RankSpec

GAP_SECONDS = 0.5  # between two lines that is not worth a name


class PhaseLines:
    """Appends changes of phase.

    Args:
        path: phases.jsonl of the attempt; None: nothing is written.
        save_interval: iterations between two checkpoints, 0: none. A save changes the phase even
            where it took no time: what comes later may be lost.
    """

    def __init__(self, path: Path | None, save_interval: int) -> None:
        self.path = path
        self.save_interval = save_interval
        self.step = 0
        self.at = 0.0  # when the last line came, seconds since 1970
        self.began = False
        self.evaluated = False

    def begin(self, step: int, now: float) -> None:
        """The engine starts, to go on from `step`."""
        self.step = step
        self.at = now

    def iteration(self, step: int, elapsed_ms: float | None, now: float) -> None:
        """A line of training came.

        Args:
            step: its iteration.
            elapsed_ms: of one iteration since the line before, as it says.
            now: seconds since 1970.
        """
        if step <= self.step:
            return
        each = (now - self.at) / (step - self.step)
        if elapsed_ms is not None:
            each = min(each, elapsed_ms / 1000.0)
        begin = now - each * (step - self.step)
        if not self.began:
            self.began = True
            self._note(begin, "train", self.step)
        elif begin - self.at > GAP_SECONDS:
            self._note(self.at, self._pause(), self.step)
            self._note(begin, "train", self.step)
        elif self.save_interval and self.step and self.step % self.save_interval == 0:
            self._note(begin, "train", self.step)
        if self.save_interval:
            saved = step // self.save_interval * self.save_interval
            if self.step < saved < step:
                self._note(now - each * (step - saved), "train", saved)
        self.step = step
        self.at = now
        self.evaluated = False

    def done(self, now: float) -> None:
        """All iterations are done, and the engine has ended."""
        if not self.began:
            return
        if now - self.at > GAP_SECONDS:
            self._note(self.at, self._pause(), self.step)
        self._note(now, "done", self.step)

    def _pause(self) -> str:
        return "eval" if self.evaluated else "save"

    def _note(self, at: float, phase: str, step: int) -> None:
        """One write a line. A disk that fails costs the line."""
        if self.path is None:
            return
        row = {"time": at, "phase": phase, "step": step, "data_seconds": 0.0}
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, (json.dumps(row) + "\n").encode())
            finally:
                os.close(handle)
        except OSError:
            self.path = None


# between two lines of the engine, in units of the longest time between two so far: an evaluation or
# a save may lie between the next two
QUIET_LINES = 3.0
# between two signs of life of a program that prints no steps
ALIVE_SECONDS = 5.0


class RankReport:
    """What one rank reports to its agent, and the rows of metrics.jsonl.

    Args:
        spec: of the rank.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.rank = int(os.environ.get("RANK", "0"))
        heartbeat = os.environ.get("TRAINKIT_HEARTBEAT_FILE")
        error = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.heartbeat = Path(heartbeat) if heartbeat else None
        self.error = Path(error) if error else None
        phases = self.heartbeat.parent.parent / "phases.jsonl" if self.heartbeat else None
        self.phases = PhaseLines(phases, spec.save_interval)
        self.last_iteration: int | None = None
        self.step = 0
        self._line_at: float | None = None
        self._longest = 0.0
        self._silent = False  # a file could not be written, and that was said

    def begin(self, step: int | None) -> None:
        """The engine is about to go on from this iteration."""
        self.step = step or 0
        self.phases.begin(self.step, time.time())
        self.beat("load")

    def take(self, reading: Iteration | EvaluationLine) -> None:
        """The engine has said something."""
        if isinstance(reading, EvaluationLine):
            self._evaluated(reading)
        elif self.last_iteration is None or reading.step > self.last_iteration:
            self._stepped(reading)

    def _stepped(self, reading: Iteration) -> None:
        now = time.monotonic()
        if self._line_at is not None:
            self._longest = max(self._longest, now - self._line_at)
        self._line_at = now
        self.last_iteration = reading.step
        self.step = reading.step
        self.phases.iteration(reading.step, reading.elapsed_ms, time.time())
        self._append(self._row(reading))
        self.beat("train")

    def _row(self, reading: Iteration) -> dict[str, object]:
        spec = self.spec
        batch = reading.global_batch_size or spec.global_batch_size
        row: dict[str, object] = {
            "step": reading.step,
            "consumed_samples": reading.consumed_samples or reading.step * batch,
            "global_batch_size": batch,
            "lm_loss": reading.lm_loss,
            "grad_norm": reading.grad_norm,
            "learning_rate": reading.learning_rate,
            "loss_scale": reading.loss_scale,
            "skipped_iterations": reading.skipped_iterations,
            "nan_iterations": reading.nan_iterations,
            "elapsed_ms": reading.elapsed_ms,
        }
        samples = reading.samples_per_second
        if samples is None and reading.elapsed_ms:
            samples = batch * 1000.0 / reading.elapsed_ms
        if samples is not None:
            row.update(self._speed(samples))
        row = {key: finite(value) for key, value in row.items()}
        return {key: value for key, value in row.items() if value is not None or key in KEPT}

    def _speed(self, samples_per_second: float) -> dict[str, object]:
        spec = self.spec
        tokens = samples_per_second * spec.seq_length
        model = tokens * spec.model_flops / spec.world_size / 1e12
        hardware = tokens * spec.hardware_flops / spec.world_size / 1e12
        row: dict[str, object] = {
            "tokens_per_second": tokens,
            "samples_per_second": samples_per_second,
        }
        if not spec.model_flops:
            return row
        row = {
            **row,
            "model_tflops": model,
            "hardware_tflops": hardware,
            "mfu": None,
            "hfu": None,
            "peak": spec.peak,
        }
        if spec.peak_tflops:
            row["mfu"] = model / spec.peak_tflops
            row["hfu"] = hardware / spec.peak_tflops
        return row

    def _evaluated(self, reading: EvaluationLine) -> None:
        step = self.step if reading.step is None else reading.step
        self._append(
            {
                "step": step,
                "consumed_samples": step * self.spec.global_batch_size,
                "eval": reading.name,
                "lm_loss": finite(reading.lm_loss),
            }
        )
        self.phases.evaluated = True
        self.beat("eval")

    def _append(self, row: dict[str, object]) -> None:
        """One write a row, so that none is torn by another process."""
        line = (json.dumps(row) + "\n").encode()
        try:
            handle = os.open(self.spec.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:  # training matters more than being watched
            self._say_once(f"no metrics: {error}")

    def beat(self, phase: str) -> None:
        """Say where this rank is."""
        if self.heartbeat is None:
            return
        try:
            write_beat(self.heartbeat, self._beat_text(phase), durable=False)
        except OSError as error:
            self._say_once(f"no heartbeat: {error}")

    def _beat_text(self, phase: str) -> str:
        return json.dumps(
            document(
                "heartbeat/1",
                rank=self.rank,
                pid=os.getpid(),
                step=self.step,
                phase=phase,
                time=time.time(),
                save_seconds=None,
                quiet_seconds=QUIET_LINES * self._longest,
            )
        )

    def alive(self, phase: str) -> None:
        """Something was printed by a program whose lines say no step: a sign of life, now and
        then."""
        now = time.monotonic()
        if self._line_at is None or now - self._line_at > ALIVE_SECONDS:
            self._line_at = now
            self.beat(phase)

    def done(self) -> None:
        """Success, durable."""
        self.phases.done(time.time())
        self.step = self.spec.train_iters
        if self.heartbeat is not None:
            write_beat(self.heartbeat, self._beat_text("done"), durable=True)

    def fail(self, verdict: Verdict) -> None:
        """Why this rank has not succeeded. A full disk must not hide it: it is on stderr too."""
        if self.error is None or not verdict.message:
            return
        with contextlib.suppress(OSError):
            write_json(
                self.error,
                document(
                    "rank-error/1",
                    rank=self.rank,
                    host=os.uname().nodename,
                    step=self.step,
                    time=utc_now(),
                    timestamp=int(time.time()),
                    exit=verdict.exit,
                    type=verdict.type,
                    message=verdict.message,
                    traceback="",
                ),
            )

    def _say_once(self, text: str) -> None:
        if not self._silent:
            self._silent = True
            sys.stderr.write(f"trainkit: WARNING: {text}\n")


# keys of a row that are there even where the engine does not say them
KEPT = ("lm_loss", "mfu", "hfu", "peak")


def finite(value: object) -> object:
    """The value of a row; JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
