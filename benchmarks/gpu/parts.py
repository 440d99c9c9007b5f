"""The parts of the proof, in the order in which they are run: what decides most comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One part, a process of its own.

    Args:
        module: of benchmarks.gpu, with `run(device, size, folder)`.
        shows: what, in words.
        limit_seconds: after which it is ended, on a GPU; what it found by then is kept.
        expected_seconds: what it took on one H200 on 2026-11-26.
        guessed: no GPU has run it: what it took on two cores with a GPU that computes nothing, and
            the kernels' own time.
        options: further arguments of `run`.
    """

    module: str
    shows: str
    limit_seconds: int
    expected_seconds: int
    guessed: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


PARTS: dict[str, Part] = {
    "device": Part("device", "copy bandwidth and matrix products of the device", 90, 10),
    "numerics": Part("numerics", "families x precisions beside fp64 on the CPU", 300, 60),
    "fp8": Part("fp8", "float8: products, models beside fp64, speed beside bf16", 120, 100, True),
    "attention": Part("attention", "flash, documents in one kernel, compiled documents", 180, 40),
    "loop": Part(
        "loop", "numbers a step late, no waiting, timers, peak, saves behind training", 120, 15
    ),
    "resume": Part("resume", "SIGKILL and resume: bit-equal when deterministic", 300, 60),
    "speed-gpt2": Part(
        "speed_gpt2", "GPT-2 124M, tokens/s beside a plain torch loop in the same run", 400, 110
    ),
    "speed-llama": Part(
        "speed_llama",
        "Llama-3-8B from two shorter stacks, beside the same plain loop",
        480,
        145,
    ),
    "memory": Part("memory", "the plan's memory beside the allocator's peak", 300, 60),
    "speed-llama-none": Part(
        "speed_llama", "the same without recomputation", 480, 210, True, {"recompute": "none"}
    ),
    "kernels": Part(
        "kernels", "every operation of trainkit.ops: numerics, % of a copy", 480, 300, True
    ),
}
CPU_LIMIT_SECONDS = 900  # of a part at small size: it guards against hanging alone
PACKED_DATA = "TRAINKIT_GPU_PACKED_DATA"  # tells parts where the data/ of the packed folder is
