"""Tokens a second of the trainer and of a plain torch loop, each alone on the device, in the same
run: the contenders' processes of benchmarks/train_step.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged
from benchmarks.train_step import Case, Failed, Worker
from trainkit.jobs.devices import Device, reported_device

if TYPE_CHECKING:
    from benchmarks.gpu.sessions import DeviceType

THREADS = 2  # on a CPU
GOAL_ROW = "h200-sxm-141gb"  # of the device table
BLOCKS = 3  # of steps in a row, without a stop between them; the median counts
CONTENDERS = ("trainkit", "plain loop")
PLAIN_KERNELS = "trainkit, plain torch kernels"  # where `auto` takes the fused ones


@dataclass(frozen=True)
class Measured:
    """One contender.

    Args:
        seconds: of a step, the median of the blocks.
        peak_bytes: the highest memory.
        about: what it said of itself: parameters, flops_per_token, first_loss.
    """

    seconds: float
    peak_bytes: int
    about: dict[str, Any]


def measure(name: str, case: Case, device: DeviceType) -> Measured:
    """Run one contender. Raises train_step.Failed with its last words."""
    worker = Worker(name, case, "bf16", device, THREADS)
    worker.ready()
    for _ in range(BLOCKS):
        worker.step(case.rounds)
    worker.end()
    return Measured(statistics.median(worker.seconds), worker.peak, worker.about)


def contend(
    words: str, case: Case, device: DeviceType, names: Sequence[str] = CONTENDERS
) -> Iterator[tuple[str, Measured | Finding]]:
    """Each contender's measure, or the finding that it failed."""
    for name in names:
        try:
            yield name, measure(name, case, device)
        except Failed as error:
            last = " | ".join(line.strip(" |") for line in str(error).splitlines()[-3:])
            yield name, judged(f"{words}: {name} runs", False, note=last)


def rates(
    words: str, tokens_per_second: float, flops_per_token: float, peak_tflops: float | None
) -> str:
    """Model TFLOP/s and MFU of a rate, for a note. The peak is the table's, or there is no MFU."""
    tflops = tokens_per_second * flops_per_token / 1e12
    mfu = f"{tflops / peak_tflops:.1%}" if peak_tflops else "n/a"
    return f"{words}{tflops:.0f} model TFLOP/s, MFU {mfu}"


def _row(device: DeviceType) -> Device | None:
    """The row of the device table of this very GPU; None for any other, and for a CPU."""
    import torch

    if device == "cpu":
        return None
    return reported_device(torch.cuda.get_device_name())


def peak_tflops(device: DeviceType) -> float | None:
    """Its bf16 peak; None where it is not known."""
    row = _row(device)
    return None if row is None else row.peak_tflops.get("bf16")


def is_goal_gpu(device: DeviceType) -> bool:
    """Whether this is the GPU that the goals are of."""
    row = _row(device)
    return row is not None and row.name == GOAL_ROW
