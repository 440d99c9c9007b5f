"""The global batch of every step: constant, or growing over the first samples of a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from trainkit.jobs.schema import Job


def global_batch_size(job: Job, consumed_samples: int) -> int:
    """Samples of the step that begins after `consumed_samples`."""
    ramp = job.training.rampup_batch_size
    return ramped_batch_size(job.global_batch_size, ramp, consumed_samples)


def ramped_batch_size(whole: int, ramp: Sequence[int] | None, consumed_samples: int) -> int:
    """Samples of the step that begins after `consumed_samples`.

    With a ramp (start, increment, samples): start, grown by increment as often as
    whole (samples / number of increments) were consumed; beyond samples the whole global batch.
    In Megatron-LM's floating-point arithmetic, so that the change comes at its step
    (core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator.update). A
    ramp over 0 samples, or from the whole batch, is none.
    """
    if ramp is None:
        return whole
    start, increment, samples = ramp
    increments = (whole - start) // increment
    if increments == 0 or samples == 0 or consumed_samples > samples:
        return whole
    return start + int(consumed_samples / (samples / increments)) * increment


def batch_sizes(job: Job) -> list[int]:
    """Every size that the global batch can have, rising. Each must divide by micro_batch_size x
    data-parallel size before the first step: after data was passed over, a ramp may stop at
    sizes that it jumps over otherwise."""
    whole = job.global_batch_size
    ramp = job.training.rampup_batch_size
    if ramp is None or ramp[2] == 0:
        return [whole]
    return list(range(ramp[0], whole + 1, ramp[1]))


def consumed_after(job: Job, steps: int, consumed_samples: int = 0) -> int:
    """Consumed samples once `steps` more global batches were read. Takes no time for long runs:
    all steps of one size are found at once."""
    whole = job.global_batch_size
    while steps > 0:
        size = global_batch_size(job, consumed_samples)
        if size == whole:
            same = steps
        else:
            same = bisect_right(
                range(steps),
                size,
                key=lambda n: global_batch_size(job, consumed_samples + n * size),
            )
        consumed_samples += same * size
        steps -= same
    return consumed_samples
