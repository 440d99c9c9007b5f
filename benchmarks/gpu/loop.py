"""The trainer's loop on the device: numbers one step late, nothing that waits, timers beside events
of our own, the right peak for MFU, and checkpoints behind training from page-locked memory.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.findings import Finding, judged, judged_if, not_shown
from benchmarks.gpu.sessions import DeviceType, Size, make_job, small_model, trainer
from benchmarks.gpu.shapes import gpt2_124m
from trainkit.jobs.devices import reported_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trainkit.jobs.schema import Job
    from trainkit.train.trainer import Trainer

WARM = 3  # steps before anything is measured
STEPS = 5
COVERED = (0.8, 1.02)  # of a step's time, that the phases must add up to
SYNCHRONIZES = "called a synchronizing CUDA operation"  # torch's words; it also warns of the mode
STALL = 0.05  # of a blocking save, that one behind training may stop it for


def _job(device: DeviceType, size: Size, folder: Path, *, save_async: bool = True) -> Job:
    if size == "small":
        return make_job(
            "loop", small_model("gpt"), device, folder, precision="bf16", save_async=save_async
        )
    return make_job(
        "loop",
        gpt2_124m(),
        device,
        folder,
        precision="bf16",
        micro_batch_size=8,
        save_async=save_async,
    )


def _step(made: Trainer) -> list[int]:
    """Take a step, and say whose numbers were there after it."""
    made.train_step()
    return [facts.step for facts, _ in made.readback.take()]


def _readback(made: Trainer, device: DeviceType) -> Finding:
    """Which steps' numbers each step brings."""
    brought = [_step(made) for _ in range(WARM)]
    late = 1 if device == "cuda" else 0
    expected = [[step - late] if step > late else [] for step in range(1, WARM + 1)]
    rest = [facts.step for facts, _ in made.readback.take(all=True)]
    expected_rest = list(range(WARM - late + 1, WARM + 1))
    return judged(
        "steps until a step's numbers are read",
        brought == expected and rest == expected_rest,
        float(late),
        goal="1 on CUDA, 0 on the CPU; all in order",
    )


def _waits(made: Trainer) -> Finding:
    """Operations in a step that make the host wait for the device, as torch reports them."""
    import torch

    _step(made)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(STEPS):
            _step(made)
        torch.cuda.set_sync_debug_mode("default")
    places = {
        f"{Path(one.filename).name}:{one.lineno}"
        for one in said
        if SYNCHRONIZES in str(one.message)
    }
    return judged(
        "operations in a step that wait for the device",
        not places,
        float(len(places)),
        goal="0",
        note=", ".join(sorted(places)),
    )


def _timers(made: Trainer, device: DeviceType) -> Finding:
    """The phases' sum in parts of the time that the steps took by a clock of our own."""
    import torch

    made.timers.forget()
    if device == "cuda":
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
    began = time.perf_counter()
    for _ in range(STEPS):
        _step(made)
    if device == "cuda":
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
    else:
        took = 1000 * (time.perf_counter() - began)
    list(made.readback.take(all=True))
    covered = STEPS * sum(made.timers.take(STEPS).values()) / took
    low, high = COVERED
    return judged_if(
        device == "cuda",
        "phases of the timers, in parts of the steps' time",
        low <= covered <= high,
        covered,
        goal=f"{low:g} to {high:g}",
    )


def _peak(made: Trainer, device: DeviceType) -> Finding:
    """What MFU is measured against: the table's row of this very GPU, or nothing."""
    import torch

    row = None
    if device == "cuda":
        row = reported_device(torch.cuda.get_device_name())
    precision = made.job.training.precision
    wanted = row and row.peak_tflops.get(precision)
    return judged(
        "peak that MFU is measured against",
        made.step_log.utilization.peak_tflops == (wanted or None),
        made.step_log.utilization.peak or "n/a",
        goal="this GPU's own, or n/a",
    )


def _state(made: Trainer) -> dict[str, list[Tensor]]:
    """Copies of all that a checkpoint holds."""
    return {
        name: [part.clone() for part in shards.parts.values()]
        for name, shards in made.step_runner.tensors().items()
    }


def _save_behind(made: Trainer, device: DeviceType) -> Iterator[Finding]:
    """Save while training goes on, read it back, and compare it with what was there."""
    import torch

    made.save(last=False)  # makes the buffers
    made.checkpoints.wait_for_save(last=True)
    _step(made)
    list(made.readback.take(all=True))
    before = _state(made)
    began = time.perf_counter()
    made.save(last=False)
    stall = time.perf_counter() - began
    for _ in range(STEPS):  # the weights change while they are written
        _step(made)
    list(made.readback.take(all=True))
    made.checkpoints.wait_for_save(last=True)
    saved_at = made.step - STEPS
    loaded = made._load_newest()
    same = loaded and made.step == saved_at
    for name, parts in _state(made).items():
        same = same and all(map(torch.equal, parts, before[name]))
    yield judged(
        "a checkpoint written behind training is what was there when it was asked for",
        same,
        "bit-equal" if same else "differs",
        goal="bit-equal",
    )
    pinned = all(room.is_pinned() for room in made.checkpoints._staging._room.values())
    if device == "cuda":
        yield judged("it is copied into page-locked memory", pinned, "yes" if pinned else "no")
    yield Finding("training stops for such a save", "shown", 1000 * stall, "ms")


def _blocking(job: Job) -> float:
    """Seconds of a save in training's way, the second one."""
    seconds = 0.0
    with trainer(job) as made:
        for _ in range(2):
            _step(made)
            list(made.readback.take(all=True))
            began = time.perf_counter()
            made.save(last=True)
            seconds = time.perf_counter() - began
    return seconds


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """All of it, on one trainer, and a second one for the blocking save."""
    stall = 0.0
    with trainer(_job(device, size, folder)) as made:
        yield _readback(made, device)
        if device == "cuda":
            yield _waits(made)
        else:
            yield not_shown("operations in a step that wait for the device", "a CPU has none")
        yield _timers(made, device)
        yield _peak(made, device)
        for finding in _save_behind(made, device):
            if finding.unit == "ms" and isinstance(finding.value, float):
                stall = finding.value / 1000
            yield finding
    blocking = _blocking(_job(device, size, folder, save_async=False))
    part = stall / blocking
    yield judged_if(
        size == "full",
        "it stops training, in parts of a save in its way",
        part <= STALL,
        part,
        goal=f"at most {STALL:g}",
        note=f"that save takes {blocking:.2f} s",
    )
