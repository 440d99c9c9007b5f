"""What rank 0 writes while it trains: metrics.jsonl, TensorBoard, Weights & Biases, Megatron's
log lines, and which samples each step took."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.base.printable import warn
from trainkit.jobs.schema import Job
from trainkit.runs.expert_loads import ExpertLoads, ExpertLoadsLog, expert_loads_path
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, read_rows, truncate_metrics
from trainkit.runs.phases import RankTimesLog, rank_times_path
from trainkit.runs.sample_windows import SampleWindow, SampleWindowLog
from trainkit.train.metrics.wandb import open_wandb

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HIGHEST_EXPONENT = 20.0  # Megatron's limit on what a perplexity is computed of


def finite(value: object) -> object:
    """A JSON value with null for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def scalars(row: MetricsRow) -> Iterator[tuple[str, float]]:
    """Tags and values for TensorBoard; what is not known or not finite is left out. Names and
    units are Megatron-LM's (training/training.py, training_log): seconds, TFLOP/s of one
    device."""
    values: dict[str, float | None] = {
        "lm loss": row["lm_loss"],
        "mtp_1 loss": row.get("mtp_loss"),
        "learning-rate": row["learning_rate"],
        "grad-norm": row["grad_norm"],
        "loss-scale": row["loss_scale"],
        "batch-size": row["global_batch_size"],
        "throughput": row["model_tflops"],
        "tokens-per-second": row["tokens_per_second"],
        "mfu": row["mfu"],
        "hfu": row["hfu"],
        "iteration-time": row["elapsed_ms"] / 1000,
    }
    for phase, milliseconds in row["times_ms"].items():
        values[f"{phase}-time"] = milliseconds / 1000
    for kind, size in row["memory_bytes"].items():
        values[f"mem-{kind.replace('_', '-')}-bytes"] = size
    for key, number in row.get("experts", {}).items():
        values[f"expert-{key.replace('_', '-')}"] = number
    for tag, value in values.items():
        if value is not None and math.isfinite(value):
            yield tag, value


def log_line(row: MetricsRow, train_iters: int) -> str:
    """Megatron's log line; after it, what Megatron prints under --log-throughput, and MFU (HFU,
    where it differs); and how many experts had no row, if any."""
    line = (
        f" iteration {row['step']:8d}/{train_iters:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} |"
        f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
        f" learning rate: {row['learning_rate']:.6E} |"
        f" global batch size: {row['global_batch_size']:5d} |"
        f" lm loss: {row['lm_loss']:.6E} |"
        f" loss scale: {row['loss_scale']:.1f} |"
        f" grad norm: {row['grad_norm']:.3f} |"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" number of nan iterations: {row['nan_iterations']:3d} |"
        f" throughput per device (TFLOP/s): {row['model_tflops']:.3f} |"
        f" MFU: {_percent(row['mfu'])} |"
    )
    if row["hardware_tflops"] != row["model_tflops"]:
        line += f" HFU: {_percent(row['hfu'])} |"
    if dead := row.get("experts", {}).get("dead"):
        line += f" dead experts: {dead} |"
    return line


def _percent(part: float | None) -> str:
    return "n/a" if part is None else f"{100 * part:.1f}%"


def take_back(metrics: Path, step: int, *, evaluated: bool) -> None:
    """Cut metrics.jsonl back to `step`, and where the evaluation of that very step is made
    again, its rows too."""
    truncate_metrics(metrics, step)
    if not evaluated and any("eval" in row and row["step"] == step for row in read_rows(metrics)):
        kept = [row for row in read_rows(metrics) if "eval" not in row or row["step"] != step]
        write_text(metrics, "".join(json.dumps(row) + "\n" for row in kept))


class LineFile:
    """Appends lines to a file. What the disk does not take waits in memory for the next line or
    `flush`: a full disk must not end training here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._warned = False
        self._durable = False
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def append(self, line: str) -> None:
        """One more line; a failing disk is warned of once."""
        self._waiting = self._waiting + line.encode() + b"\n"
        self._durable = False
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                warn(f"{self.path}: {error.strerror}; its rows wait in memory")
            self._warned = True

    def flush(self) -> None:
        """Make all of it durable. Raises OSError as the disk does; nothing is lost then."""
        if self._durable:
            return
        self._write()
        os.fsync(self._handle)
        self._warned = False
        self._durable = True

    def make_durable(self) -> None:
        """What is in the file, from whatever thread; a disk that fails is for `flush` to say."""
        with contextlib.suppress(OSError):
            os.fsync(self._handle)

    def refuse_another(self) -> None:
        """Raises TrainkitError (exit 17) where the file is not ours any more: another attempt
        has gone on with the run, and this one was taken for dead."""
        if os.path.exists(self.path) and not os.path.samestat(
            os.stat(self.path), os.fstat(self._handle)
        ):
            raise TrainkitError(
                f"{self.path} was begun again by another process while this one trained: two of"
                " them train one run, or its file was replaced by hand",
                exit=Exit.HOSTS_BUSY,
                hint="end one of them; the other's checkpoints and metrics are whole",
            )

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1  # the number may be somebody else's file soon

    def _write(self) -> None:
        while self._waiting:  # of a line that was taken in part, the rest follows
            self._waiting = self._waiting[os.write(self._handle, self._waiting) :]


class TensorBoardFiles:
    """TensorBoard's files. Where they cannot be written, values are left out with a warning
    until `flush` can open another file."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None
        # what earlier files hold from this step on is taken back
        self._purge: int | None = after + 1
        self._warned = False
        self._open()

    def add(self, tag: str, value: float, step: int) -> None:
        if self.writer:
            self._try(lambda writer: writer.add_scalar(tag, value, step), self.writer)

    def flush(self) -> None:
        """Hand all of it to the system."""
        if self.writer:
            self._try(lambda writer: writer.flush(), self.writer)
        else:
            self._open()

    def close(self) -> None:
        if self.writer:
            self._try(lambda writer: writer.close(), self.writer)

    def _open(self) -> None:
        # half a second, which only the rank that writes must spend
        from torch.utils.tensorboard import SummaryWriter

        try:
            self.writer = SummaryWriter(str(self.folder), purge_step=self._purge)
            self._purge = None
        except OSError as error:
            self._warn(error)

    def _try(self, call: Callable[[SummaryWriter], None], writer: SummaryWriter) -> None:
        try:
            call(writer)
        except OSError as error:  # its thread has ended with it
            self.writer = None
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            warn(f"TensorBoard's files cannot be written: {error}; metrics.jsonl has all rows")
        self._warned = True


class Reporter:
    """Opens the run's files to go on after `step`; what they hold of later steps is taken back
    first.

    Args:
        run: the run folder.
        job: the job.
        step: the step training goes on from; -1: from the very beginning.
        evaluated: whether the evaluation of that step was made.

    Raises ConfigError where the job wants Weights & Biases and it cannot be had.
    """

    def __init__(self, run: RunFolder, job: Job, step: int, *, evaluated: bool = True) -> None:
        self.wandb = open_wandb(job, run)
        take_back(run.metrics, step, evaluated=evaluated)
        self.job = job
        self.metrics = LineFile(run.metrics)
        self.board = TensorBoardFiles(run.tensorboard, step)
        self.windows = SampleWindowLog(run)
        self.rank_times = RankTimesLog(rank_times_path(run))
        self.expert_loads = ExpertLoadsLog(expert_loads_path(run), step)
        self.peak_reported = False
        self.missed_window = False

    def on_step_begin(self, window: SampleWindow) -> None:
        """A step is about to take these samples. Where the disk fails they are not noted, and
        training goes on."""
        try:
            self.windows.note(window)
        except OSError as error:
            if not self.missed_window:
                warn(
                    f"samples of step {window.step} cannot be noted: {error}; `replay` knows those"
                    " of logged steps"
                )
            self.missed_window = True

    def step(
        self,
        row: MetricsRow,
        compute_ms: Sequence[float] = (),
        expert_loads: ExpertLoads | None = None,
    ) -> None:
        """One training row (docs/run-folder.md): to the metrics, to TensorBoard under Megatron's
        names, to W&B, and as log lines to stdout.

        The line of times has rank 0's own, where Megatron's has the minimum and the maximum of all
        ranks.

        Args:
            row: its values; those that are not finite are null in the metrics.
            compute_ms: what every rank computed, where there are several.
            expert_loads: of the steps of the row, where the model has experts.
        """
        self._append(row)
        if expert_loads is not None:
            self.expert_loads.note(expert_loads)
        if compute_ms:
            self.rank_times.note(row["step"], compute_ms)
        for tag, value in scalars(row):
            self.board.add(tag, value, row["step"])
        if self.wandb:
            self.wandb.step(row)
        if not self.peak_reported:
            self.peak_reported = True
            unknown = (
                f"n/a: no peak is known of device {self.job.cluster.device.name!r} in"
                f" {self.job.training.precision}"
            )
            sys.stdout.write(f" MFU is measured against {row['peak'] or unknown}\n")
        times = "".join(
            f" {phase}: {milliseconds:.2f} |" for phase, milliseconds in row["times_ms"].items()
        )
        line = log_line(row, self.job.training.train_iters)
        sys.stdout.write(f"{line}\n time (ms) |{times}\n")
        sys.stdout.flush()

    def evaluation(self, step: int, consumed_samples: int, name: str, loss: float) -> None:
        """One row of an evaluation.

        Args:
            step: after so many steps.
            consumed_samples: of training, by then.
            name: of the validation set; the job's own is called `valid`.
            loss: mean cross-entropy, in nats.
        """
        row: MetricsRow = {
            "step": step,
            "consumed_samples": consumed_samples,
            "eval": name,
            "lm_loss": loss,
        }
        self._append(row)
        # in this order NaN stays NaN
        perplexity = math.exp(min(loss, HIGHEST_EXPONENT))
        suffix = ""
        where = ""
        if name != "valid":
            suffix = f" {name}"
            where = f" on {name}"
        for tag, value in (
            ("lm loss validation", loss),
            ("lm loss validation ppl", perplexity),
        ):
            if math.isfinite(value):
                self.board.add(f"{tag}{suffix}", value, step)
        if self.wandb:
            self.wandb.evaluation(step, consumed_samples, name, loss)
        sys.stdout.write(
            f" validation loss at iteration {step}{where} | lm loss value:"
            f" {loss:.6E} | lm loss PPL: {perplexity:.6E} |\n"
        )
        sys.stdout.flush()

    def sync(self) -> None:
        """Make everything reported so far durable: a checkpoint must not know more than the
        metrics. Raises OSError as the disk does."""
        self.metrics.flush()
        self.board.flush()

    def close(self, *, failed: bool = False) -> None:
        """The end of the run's files. Raises OSError as the disk does; with `failed`, where
        something worse has ended the run already, that is a warning."""
        try:
            self.sync()
        except (OSError, TrainkitError) as error:
            if not failed:
                raise
            warn(f"{self.metrics.path}: {error}; its last rows may be missing")
        finally:
            self.metrics.close()
            self.board.close()
            self.windows.close()
            if self.wandb:
                self.wandb.close()

    def _append(self, row: MetricsRow) -> None:
        self.metrics.append(json.dumps(finite(row), allow_nan=False))
