"""What the device itself does: the rate of a copy and of matrix products, which all other figures
are read with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.findings import Finding, judged
from benchmarks.gpu.sessions import DeviceType, Size
from trainkit.jobs.devices import reported_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPEATS = 20
WARM = 5
BYTES = {"small": 2**24, "full": 2**32}
SIDES = {"small": 256, "full": 8192}


def seconds_of(work: Callable[[], object], device: DeviceType) -> float:
    """Of one call, the mean of REPEATS after WARM."""
    import torch

    for repeat in range(WARM + REPEATS):
        if repeat == WARM:
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS


def _copy_rate(device: DeviceType, size: Size) -> float:
    import torch

    source = torch.zeros(BYTES[size], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device)


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Copy, products, and the row of the device table."""
    import torch

    if device == "cuda":
        name = torch.cuda.get_device_name()
        row = reported_device(name)
        label = row.label if row is not None else f"{name!r} is not in it: no MFU"
        yield Finding("row of the device table", "shown", label)
        probe = torch.ones(4, device=device).mul_(2).sum()
        yield judged("a kernel runs", float(probe) == 8.0, "yes", goal="its result is right")
    yield Finding("copy, bytes read and written", "shown", _copy_rate(device, size) / 1e9, "GB/s")
    side = SIDES[size]
    for dtype in (torch.bfloat16, torch.float32):
        # random: on zeros a GPU draws less power and is faster
        a = torch.randn(side, side, device=device).to(dtype)
        b = torch.randn(side, side, device=device).to(dtype)
        flops = 2 * side**3 / seconds_of(lambda a=a, b=b: torch.mm(a, b), device)  # type: ignore[misc]
        words = f"product of {side} x {side}, {str(dtype).removeprefix('torch.')}"
        yield Finding(words, "shown", flops / 1e12, "TFLOP/s")
