"""The rows of metrics.jsonl as they are made: one of logged steps, one of an evaluation. Their keys
are described in docs/run-folder.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainkit.base.records import INLINE, OMIT_NONE, Record


@dataclass(frozen=True)
class Throughput:
    """How much of a device is used.

    Args:
        model_tflops: TFLOP/s per device that the model needs.
        hardware_tflops: the same with what is computed again.
        mfu, hfu: both as parts of the peak, 0 to 1; None where no peak is known.
        peak: what they are measured against, in words.
    """

    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None
    peak: str | None


@dataclass(frozen=True)
class TrainingRecord(Record):
    """A row of the steps since the last one. Field names are the row's keys, in their order;
    those of `throughput` stand in the row itself, tables that are None are left out."""

    step: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped_iterations: int
    nan_iterations: int
    rollbacks: int
    elapsed_ms: float
    tokens_per_second: float
    samples_per_second: float
    throughput: Throughput = field(metadata=INLINE)
    batch_checksum: int
    times_ms: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    ranks: Mapping[str, float] | None = field(default=None, metadata=OMIT_NONE)
    pipeline: Mapping[str, float] | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """A row of one validation set.

    Args:
        step: after so many steps.
        consumed_samples: of training, by then.
        name: of the validation set; the job's own is called `valid`. The row's key is `eval`.
        lm_loss: mean cross-entropy, in nats.
    """

    step: int
    consumed_samples: int
    name: str = field(metadata={"key": "eval"})
    lm_loss: float
