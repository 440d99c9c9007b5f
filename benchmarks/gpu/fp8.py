"""precision = "fp8": the products of linear layers beside their emulation on the CPU, loss and
gradients of models beside fp64, and speed beside bf16 in the same process.

Bounds: E4M3 has 4 bits of mantissa and E5M2 3, so a rounded operand is off by 2 to 3 parts in 100
(of gradients in E5M2 by 5); a product of two, summed over hundreds of terms, by 4 to 6 in 100, and
the gradients of a few layers by some times that. A wrong scale or operand is off by all of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.gpu.findings import Finding, judged, judged_if, not_shown
from benchmarks.gpu.numerics import Computed, by_reference, by_trainer
from benchmarks.gpu.sessions import DeviceType, Family, Size, make_job, small_model, trainer
from benchmarks.gpu.shapes import gpt2_124m, llama_3_8b
from benchmarks.gpu.speed import peak_tflops, rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trainkit.jobs.schema import Model

RECIPES: tuple[str, ...] = ("tensorwise", "rowwise")
EMULATED = 1e-2  # sums of a GPU's fast accumulation, and the rounding of results to bf16
BOUNDS = {"bf16": (5e-3, 5e-2), "fp8": (5e-3, 2e-1)}  # as of numerics.py
FAMILIES: tuple[Family, ...] = tuple(f for f in get_args(Family) if f in ("gpt", "llama"))
WARM, STEPS = 3, 5


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """All of it; what decides most comes first."""
    if why := _unable(device):
        yield not_shown("float8", why)
        return
    yield from _products(device, size)
    yield from _models(device, size, folder)
    yield from _layer(device, size)
    yield from _speed(device, size, folder)


def _unable(device: DeviceType) -> str:
    import torch

    from trainkit.plan.rules import float8_problem

    return "" if device == "cpu" else float8_problem("fp8", torch.cuda.get_device_capability())


def keys_of(precision: str) -> dict[str, Any]:
    """Of [training]: "bf16", or "fp8 RECIPE"."""
    kind, _, recipe = precision.partition(" ")
    return {"precision": kind} | ({"fp8_recipe": recipe} if recipe else {})


def _recipe(name: str) -> Any:
    from trainkit.ops.float8 import Float8Recipe

    return Float8Recipe(name == "rowwise", lambda x, _: x)


def _three(x: Tensor, w: Tensor, g: Tensor, recipe: Any) -> list[Tensor]:
    """Result and both gradients of a layer."""
    from trainkit.ops.float8 import linear

    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = linear(x, w, None, recipe)
    y.backward(g)  # type: ignore[no-untyped-call]
    assert x.grad is not None and w.grad is not None
    return [y.detach(), x.grad, w.grad]


def _products(device: DeviceType, size: Size) -> Iterator[Finding]:
    """A layer on the device beside its emulation; the second has widths that are no multiples of
    16, which a GPU's products must be."""
    import torch

    torch.manual_seed(0)
    scale = 1 if size == "small" else 8
    for tokens, inputs, outputs in ((128, 64 * scale, 96 * scale), (90, 40 * scale + 4, 56)):
        x, w, g = (
            torch.randn(shape).bfloat16() * by
            for shape, by in (
                ((tokens, inputs), 1.0),
                ((outputs, inputs), 0.02),
                ((tokens, outputs), 1e-4),
            )
        )
        for name in RECIPES:
            there = _three(x.to(device), w.to(device), g.to(device), _recipe(name))
            here = _three(x, w, g, _recipe(name))
            off = max(
                float((a.cpu().double() - b.double()).norm() / b.double().norm())
                for a, b in zip(there, here, strict=True)
            )
            words = f"{name}, ({tokens}, {inputs}) to {outputs}: device beside emulation"
            yield judged(words, off <= EMULATED, off, goal=f"at most {EMULATED:g}")


def _models(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Families beside fp64, compiled too."""
    cases = [("bf16", False), *((f"fp8 {name}", False) for name in RECIPES)]
    if size == "full":
        cases += [(f"fp8 {name}", True) for name in RECIPES]
    for family in FAMILIES:
        reference: Computed | None = None
        for precision, compiled in cases:
            words = f"{family} {precision}" + (" compiled" if compiled else "")
            keys = keys_of(precision)
            job = make_job(
                "fp8", small_model(family, size), device, folder, compile=compiled, **keys
            )
            found, batches = by_trainer(job)
            reference = reference or by_reference(job, batches)
            off = abs(found.loss - reference.loss) / reference.loss
            distance = found.distance(reference)
            most = BOUNDS[keys["precision"]]
            value = f"loss {off:.1e}, gradients {distance:.1e}"
            goal = f"{most[0]:.0e}, {most[1]:.0e}"
            yield judged(words, off <= most[0] and distance <= most[1], value, goal=goal)


def _layer(device: DeviceType, size: Size) -> Iterator[Finding]:
    """The widest layer of Llama-3-8B by itself, compiled: three products of 8,192 tokens."""
    import torch
    import torch.nn.functional as F

    from trainkit.ops.float8 import linear

    tokens, inputs, outputs = (8192, 4096, 28672) if size == "full" else (64, 64, 128)
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    for precision in ("bf16", *RECIPES):

        def product(x: Tensor, w: Tensor, precision: str = precision) -> Tensor:
            return F.linear(x, w) if precision == "bf16" else linear(x, w, None, _recipe(precision))

        compiled = torch.compile(product, dynamic=False) if device == "cuda" else product
        seconds = _seconds(device, lambda compiled=compiled: compiled(x, w).backward(g))  # type: ignore[misc]
        speed = 6 * tokens * inputs * outputs / seconds / 1e12
        words = f"a layer of {inputs} to {outputs}, forward and backward, {precision}"
        yield Finding(words, "shown", speed, "TFLOP/s", note="its rounding included")


def _seconds(device: DeviceType, once: Callable[[], object]) -> float:
    import torch

    def several(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            once()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    several(WARM)
    return min(several(STEPS) for _ in range(2))


def _speed(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Tokens a second of whole steps. Most of two layers of Llama is its head, in bf16."""
    recipes = tuple(f"fp8 {name}" for name in RECIPES)
    cases: list[tuple[Model, int, int, tuple[str, ...]]] = [
        (llama_3_8b(2, 8192), 1, 4, ("bf16", *recipes)),
        (gpt2_124m(1024), 32, 4, ("bf16", recipes[0])),
    ]
    if size == "small":
        cases = [(small_model("llama"), 1, 2, ("bf16", *recipes))]
    for model, micro_batch, accumulation, precisions in cases:
        found: dict[str, float] = {}
        words = f"{model.name}, {model.num_layers} layers, {micro_batch} x {model.seq_length}"
        for precision in precisions:
            job = make_job(
                "fp8",
                model,
                device,
                folder,
                compile=device == "cuda",
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                **keys_of(precision),
            )
            with trainer(job) as made:

                def step(made: Any = made) -> None:
                    made.train_step()
                    made.readback.take()

                seconds = _seconds(device, step)
                flops = made.step_log.utilization.model_flops
            speed = job.global_batch_size * model.seq_length / seconds
            found[precision] = speed
            note = rates("", speed, flops, peak_tflops(device)) + " of bf16's peak"
            yield Finding(f"{words}: {precision}", "shown", speed, "tokens/s", note=note)
            if precision != "bf16":
                yield judged_if(
                    size == "full" and model.family == "llama" and precision == recipes[0],
                    f"{words}: {precision} in parts of bf16",
                    speed > found["bf16"],
                    speed / found["bf16"],
                    goal="above 1",
                )
