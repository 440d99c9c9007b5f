"""The plan's memory beside what torch's allocator says was in use at the highest.

What is compared is what the plan has at one time, without its reserve: that is for what is not
torch's (context, workspaces) and for what the allocator cannot use. The plan's total is an upper
bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged, not_shown
from benchmarks.gpu.sessions import DeviceType, Size, make_job, small_model, trainer
from benchmarks.gpu.shapes import gpt2_124m, llama_3_8b, planned, too_large

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainkit.jobs.schema import Job, Model

WITHIN = 0.05
WARM = 2  # steps before the peak counts: compiling allocates for itself


def cases(size: Size) -> list[tuple[str, Model, dict[str, Any]]]:
    """(name, model, keys of its training)."""
    if size == "small":
        return [(f"small {family}", small_model(family), {}) for family in ("gpt", "llama")]
    gpt = gpt2_124m()
    found: list[tuple[str, Model, dict[str, Any]]] = []
    for recompute in ("none", "selective", "full"):
        for compiled in (False, True):
            words = f"gpt2-124m, recompute {recompute}" + (", compiled" if compiled else "")
            keys = {
                "recompute_granularity": recompute,
                "compile": compiled,
                "micro_batch_size": 8,
            }
            found.append((words, gpt, keys))
    llama = llama_3_8b(layers=2, length=4096)
    for recompute in ("none", "full"):
        keys = {"recompute_granularity": recompute, "compile": True, "micro_batch_size": 1}
        found.append((f"2 layers of llama-3-8b, recompute {recompute}, compiled", llama, keys))
    return found


def peak_of(job: Job) -> dict[str, int]:
    """The trainer's own account of memory over two steps after the first ones."""
    with trainer(job) as made:
        for _ in range(WARM):
            made.train_step()
            made.process_results(all=True)
        made.step_log.memory.now()  # forgets the peak so far
        for _ in range(2):
            made.train_step()
            made.process_results(all=True)
        return made.step_log.memory.now()


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """One row a case. On a CPU the peak is the whole process's, Python and torch included: it is
    shown and not judged."""
    import torch

    there = None
    if device == "cuda":
        there = int(torch.cuda.get_device_properties(0).total_memory)
    for name, model, keys in cases(size):
        job = make_job("memory", model, device, folder, precision="bf16", **keys)
        if why := too_large(job, there):
            yield not_shown(name, why)
            continue
        plan = planned(job)
        expected = plan.highest_bytes
        try:
            found = peak_of(job)
        except torch.OutOfMemoryError as error:
            note = f"by the plan it fits; {str(error).splitlines()[0]}"
            yield judged(f"{name}: fits", False, goal="as the plan says", note=note)
            continue
        peak = found.get("max_allocated", found.get("max_resident", 0))
        words = f"planned {expected / 2**20:,.0f} MiB, peak {peak / 2**20:,.0f} MiB"
        if device == "cpu":
            yield Finding(name, "shown", words, note="the peak of a process, Python included")
            continue
        ratio = peak / expected
        words += f", reserved {found['max_reserved'] / 2**20:,.0f} MiB"
        yield judged(
            f"{name}: peak in parts of the plan's",
            abs(ratio - 1) <= WITHIN,
            ratio,
            goal=f"within {WITHIN:.0%}",
            note=words,
        )
