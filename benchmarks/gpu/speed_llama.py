"""Llama-3-8B in bf16 at 8,192 tokens a sample, from two shorter stacks of its layers.

The whole does not fit one GPU: 16 bytes a parameter are 128 GB, before its bf16 copy. A step of n
layers takes a + b n seconds (embedding, head and loss are in a; a layer, its share of the update
included, is b). Two depths give a and b, and so the seconds of 32 layers: that is extrapolated, and
is said to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.findings import Finding, judged, not_shown
from benchmarks.gpu.sessions import DeviceType, Size, make_job, small_model
from benchmarks.gpu.shapes import LLAMA_3_8B, llama_3_8b, too_large
from benchmarks.gpu.speed import CONTENDERS, contend, is_goal_gpu, peak_tflops, rates
from benchmarks.train_step import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

GOAL = 10_500  # tokens/s on one H200 with full recomputation, bf16 (KempnerForge's benchmarks)
LAYERS = 32
DEPTHS = (2, 6)
LENGTH = 8192
NAMES = {"small": "a small llama", "full": "llama-3-8b"}


@dataclass(frozen=True)
class Line:
    """Seconds of a step by depth, a + b n.

    Args:
        fixed: a.
        layer: b.
    """

    fixed: float
    layer: float

    @classmethod
    def through(cls, one: tuple[int, float], other: tuple[int, float]) -> Line:
        """Of two (layers, seconds)."""
        layer = (other[1] - one[1]) / (other[0] - one[0])
        return cls(one[1] - one[0] * layer, layer)

    def at(self, layers: int) -> float:
        """Seconds of so many layers."""
        return self.fixed + layers * self.layer


def case_of(size: Size, layers: int, recompute: str) -> Case:
    """A stack of so many layers; eight micro-batches of one sample a step."""
    if size == "small":
        model = small_model("llama").model_dump(exclude_defaults=True, exclude={"name"})
        return Case({**model, "num_layers": layers}, 1, 2, 1, recompute=recompute)
    model = {**LLAMA_3_8B, "num_layers": layers, "seq_length": LENGTH}
    return Case(model, 1, 8, 2, recompute=recompute)


def run(device: DeviceType, size: Size, folder: Path, recompute: str = "full") -> Iterator[Finding]:
    """Both depths of each contender, and what follows of them. The goal was measured with full
    recomputation.

    Args:
        device, size, folder: as of every part.
        recompute: training.recompute_granularity; the plain loop knows "full" and "none".
    """
    depths = (1, 2) if size == "small" else DEPTHS
    seconds: dict[str, list[tuple[int, float]]] = {name: [] for name in CONTENDERS}
    for layers in depths:
        words = f"{layers} layers of {NAMES[size]}, recompute {recompute}"
        if size == "full" and (why := _too_large(device, folder, layers, recompute)):
            yield not_shown(words, why)
            continue
        case = case_of(size, layers, recompute)
        for name, outcome in contend(words, case, device):
            if isinstance(outcome, Finding):
                yield outcome
                continue
            seconds[name].append((layers, outcome.seconds))
            note = f"peak {outcome.peak_bytes / 2**30:.1f} GiB"
            speed = case.tokens / outcome.seconds
            yield Finding(f"{words}: {name}", "shown", speed, "tokens/s", note=note)
    for name, points in seconds.items():
        if len(points) == 2:
            line = Line.through(points[0], points[1])
            yield _extrapolated(name, line, case_of(size, LAYERS, recompute), device, size)


def _extrapolated(name: str, line: Line, case: Case, device: DeviceType, size: Size) -> Finding:
    """The row of all 32 layers."""
    words = f"{NAMES[size]}, {LAYERS} layers, recompute {case.recompute}: {name}, extrapolated"
    if line.layer <= 0:
        return not_shown(words, "the deeper stack was no slower: what was timed is noise")
    from trainkit.jobs.schema import Model
    from trainkit.plan.arithmetic import model_flops_per_token_of

    speed = case.tokens / line.at(LAYERS)
    model = Model(name="llama", **case.model)
    flops = model_flops_per_token_of(model, case.model["vocab_size"])
    note = f"extrapolated: {line.layer * 1e3:.2f} ms a layer + {line.fixed * 1e3:.2f} ms a step; "
    note = rates(note, speed, flops, peak_tflops(device))
    if name == "trainkit" and case.recompute == "full" and is_goal_gpu(device):
        goal = f"at least {GOAL:,} on one H200"
        return judged(words, speed >= GOAL, speed, unit="tokens/s", goal=goal, note=note)
    return Finding(words, "shown", speed, "tokens/s", note=note)


def _too_large(device: DeviceType, folder: Path, layers: int, recompute: str) -> str:
    import torch

    if device == "cpu":
        return ""
    job = make_job(
        "speed",
        llama_3_8b(layers, LENGTH),
        device,
        folder,
        precision="bf16",
        recompute_granularity=recompute,
        micro_batch_size=1,
    )
    return too_large(job, int(torch.cuda.get_device_properties(0).total_memory))
