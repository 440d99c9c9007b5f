"""GPT-2 124M in bf16: tokens a second of the trainer beside the plain loop, at 1,024 and 2,048
tokens a sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.findings import Finding, judged, judged_if
from benchmarks.gpu.sessions import DeviceType, Size, small_model
from benchmarks.gpu.shapes import GPT2_124M
from benchmarks.gpu.speed import (
    CONTENDERS,
    PLAIN_KERNELS,
    Measured,
    contend,
    is_goal_gpu,
    peak_tflops,
    rates,
)
from benchmarks.train_step import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

GOAL = 460_000  # tokens/s on one H200: what llm.c takes of an H100 (modded-nanogpt's README)


def cases(size: Size) -> dict[str, Case]:
    """By name: micro-batch x length, four of them a step."""
    if size == "small":
        model = small_model("gpt").model_dump(exclude_defaults=True, exclude={"name"})
        return {"small gpt": Case({**model, "family": "gpt"}, 2, 2, 1)}
    return {
        "gpt2-124m, 32 x 1,024": Case({**GPT2_124M, "seq_length": 1024}, 32, 4, 10),
        "gpt2-124m, 16 x 2,048": Case({**GPT2_124M, "seq_length": 2048}, 16, 4, 10),
    }


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """The trainer against the goal, and against the plain loop; at the first length of a GPU also
    without its fused kernels."""
    peak = peak_tflops(device)
    for words, case in cases(size).items():
        found: dict[str, Measured] = {}
        names: tuple[str, ...] = CONTENDERS
        if device == "cuda" and "1,024" in words:
            names = ("trainkit", PLAIN_KERNELS, "plain loop")
        for name, outcome in contend(words, case, device, names):
            if isinstance(outcome, Finding):
                yield outcome
                continue
            found[name] = outcome
            speed = case.tokens / outcome.seconds
            note = rates("", speed, outcome.about["flops_per_token"], peak)
            note += f", peak {outcome.peak_bytes / 2**30:.1f} GiB"
            yield _row(f"{words}: {name}", speed, note, device, name)
        if {"trainkit", "plain loop"} <= set(found):
            ratio = found["plain loop"].seconds / found["trainkit"].seconds
            yield judged_if(
                size == "full",
                f"{words}: trainkit in parts of the plain loop",
                ratio >= 1,
                ratio,
                goal="at least 1",
            )


def _row(words: str, speed: float, note: str, device: DeviceType, name: str) -> Finding:
    """The goal is of the trainer, the first length and one kind of GPU."""
    if name == "trainkit" and "1,024" in words and is_goal_gpu(device):
        goal = f"at least {GOAL:,} on one H200"
        return judged(words, speed >= GOAL, speed, unit="tokens/s", goal=goal, note=note)
    return Finding(words, "shown", speed, "tokens/s", note=note)
