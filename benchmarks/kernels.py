"""Claim: the fused operations of trainkit/ops move their bytes at 90 % (forward) and 85 %
(backward) of the rate at which torch clones as many bytes, and are twice as fast as eager torch.

    python benchmarks/kernels.py [--quick] [--device cuda] [--only NAME] [--rows FILE]

Of every operation, forward (without autograd) and backward (torch.autograd.grad): milliseconds of
the fused operation; the limit, a clone that reads and writes `bytes_moved` bytes together, as a
share of it by the wall clock and by the process's CPU time; the CPU time of its instructions alone
(one thread, data in the cache) as a share of the limit's, which cannot be reached where that is
above 100 %; and the time of eager torch, of torch.compile and, on a GPU where they are installed,
of liger-kernel and quack-kernels over that of the fused one: above 1 the fused one is faster. All
in turns; wall clocks are medians over rounds, CPU times means.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.cli.checkout.machine import describe, machine
from trainkit.ops import (
    adamw,
    cross_entropy,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    swiglu,
)
from trainkit.ops.kernels import REFERENCE, Kernels, choose

EPS = 1e-5
GOALS = {"forward": 0.90, "backward": 0.85}
CACHED = 2**17  # elements of a tensor that lies in the cache
Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation of one shape.

    Args:
        name: of the operation.
        inputs: tensors; those of floating point get gradients.
        call: (kernels, *inputs) -> the result, or several.
        moved: bytes of forward, and of backward where there is one.
        peers: name -> of other implementations, (*inputs) -> as `call`.
    """

    name: str
    inputs: tuple[Tensor, ...]
    call: Callable[..., Any]
    moved: tuple[int, ...]
    peers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def forward(self, call: Callable[..., Any]) -> Work:
        """Of `call`, which takes the inputs."""

        def work() -> Any:
            with torch.no_grad():
                return call(*self.inputs)

        return work

    def backward(self, call: Callable[..., Any]) -> Work:
        """Of `call`: from given gradients of its results to those of its inputs."""
        leaves = [t.detach().requires_grad_() for t in self.inputs]
        results = call(*leaves)
        results = list(results) if isinstance(results, tuple) else [results]
        given = [torch.randn_like(r) for r in results]
        wanted = [leaf for leaf in leaves if leaf.grad_fn is None]
        return lambda: torch.autograd.grad(
            results, wanted, given, retain_graph=True, allow_unused=True
        )


@dataclass(frozen=True)
class Took:
    """Milliseconds of a call.

    Args:
        wall: by the wall clock, median.
        cpu: of the process's CPU time, mean.
    """

    wall: float
    cpu: float


WALL: Callable[[Took], float] = attrgetter("wall")
CPU: Callable[[Took], float] = attrgetter("cpu")


@dataclass(frozen=True)
class Row:
    """What was measured of one operation in one direction.

    Args:
        fused: the fused operation.
        limit: a clone that moves the same bytes.
        instructions: CPU milliseconds of as many bytes that lie in the cache; None: not measured.
        others: who else computes it.
    """

    name: str
    dtype: str
    direction: str
    fused: Took
    limit: Took
    instructions: float | None
    others: dict[str, Took]

    def share(self, clock: Callable[[Took], float]) -> float:
        """Of the limit."""
        return clock(self.limit) / max(clock(self.fused), 1e-9)

    def ratio(self, other: str, clock: Callable[[Took], float]) -> float:
        """How many times as long as the fused operation another takes."""
        return clock(self.others[other]) / max(clock(self.fused), 1e-9)


@dataclass(frozen=True)
class Shapes:
    """How large the tensors are.

    Args:
        rows: tokens.
        width: of a row.
        vocab: columns of logits.
        device: of the tensors.
    """

    rows: int
    width: int
    vocab: int
    device: str

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=dtype)


def norms(at: Shapes, dtype: torch.dtype) -> Iterator[Case]:
    """rms_norm and layer_norm, alone and of a residual sum; weights in fp32 or wider."""
    x, residual = (at.random(at.rows, at.width, dtype=dtype) for _ in range(2))
    weight, bias = (at.random(at.width, dtype=dtype) for _ in range(2))

    def moved(of: Callable[..., int], added: bool) -> tuple[int, int]:
        forward, backward = (
            of(x.shape, dtype, weight.dtype, added=added, backward=b) for b in (False, True)
        )
        return forward, backward

    yield Case(
        "rms_norm",
        (x, weight),
        lambda k, x, w: k.rms_norm(x, w, EPS),
        moved(rms_norm.bytes_moved, False),
        peer_norms(),
    )
    yield Case(
        "add_rms_norm",
        (x, residual, weight),
        lambda k, x, r, w: k.add_rms_norm(x, r, w, EPS),
        moved(rms_norm.bytes_moved, True),
    )
    yield Case(
        "layer_norm",
        (x, weight, bias),
        lambda k, x, w, b: k.layer_norm(x, w, b, EPS),
        moved(layer_norm.bytes_moved, False),
    )
    yield Case(
        "add_layer_norm",
        (x, residual, weight, bias),
        lambda k, x, r, w, b: k.add_layer_norm(x, r, w, b, EPS),
        moved(layer_norm.bytes_moved, True),
    )


def activations(at: Shapes, dtype: torch.dtype) -> Iterator[Case]:
    """swiglu, geglu, gelu and bias_gelu."""
    gate_up = at.random(at.rows, 2 * at.width, dtype=dtype)
    x = at.random(at.rows, at.width, dtype=dtype)
    bias = at.random(at.width, dtype=dtype)
    gated = tuple(swiglu.bytes_moved(gate_up.shape, dtype, backward=b) for b in (False, True))
    plain = tuple(gelu.bytes_moved(x.shape, dtype, backward=b) for b in (False, True))
    biased = tuple(gelu.bytes_moved(x.shape, dtype, dtype, backward=b) for b in (False, True))
    yield Case("swiglu", (gate_up,), lambda k, t: k.swiglu(t), gated, peer_swiglu())
    yield Case("geglu, tanh", (gate_up,), lambda k, t: k.geglu(t, "tanh"), gated)
    yield Case("gelu, tanh", (x,), lambda k, t: k.gelu(t, "tanh"), plain)
    yield Case("gelu, exact", (x,), lambda k, t: k.gelu(t, "none"), plain)
    yield Case("bias_gelu, tanh", (x, bias), lambda k, t, b: k.bias_gelu(t, b, "tanh"), biased)


def rotations(at: Shapes, dtype: torch.dtype) -> Iterator[Case]:
    """rotate_qkv of one sample: heads of 64 channels, a fourth of them with keys and values."""
    groups = max(1, at.width // 384)
    heads = 4 * groups
    qkv = at.random(1, at.rows, (heads + 2 * groups) * 64, dtype=dtype)
    for turning in (64, 16):
        angles = torch.arange(at.rows, device=at.device)[:, None] * torch.rand(
            turning // 2, device=at.device
        )
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        moved = rotary.bytes_moved(qkv.shape, dtype, cos.shape)
        yield Case(
            f"rotary, {turning} of 64",
            (qkv,),
            lambda k, t, cos=cos, sin=sin: k.rotate_qkv(t, cos, sin, heads, groups),
            (moved, moved),
        )


def losses(at: Shapes, dtype: torch.dtype) -> Iterator[Case]:
    """Cross-entropy with its gradient in the logits' place."""
    rows = max(1, at.rows * at.width // at.vocab)
    logits = at.random(rows, at.vocab, dtype=dtype)
    labels = torch.randint(at.vocab, (rows,), device=at.device)
    scale = torch.ones((), device=at.device)
    yield Case(
        "softmax_loss",
        (logits,),
        lambda k, t: k.softmax_loss(t, labels, at.vocab, 0.0, scale, True),
        (cross_entropy.bytes_moved(rows, at.vocab, dtype),),
        peer_loss(labels),
    )


def updates(at: Shapes, dtype: torch.dtype) -> Iterator[Case]:
    """AdamW on fp32 weights and moments, by gradients of `dtype`, with a copy in 16 bits."""
    elements = at.rows * at.width // 2
    tensors = [at.random(elements, dtype=torch.float32).abs() for _ in range(3)]
    gradient = at.random(elements, dtype=dtype)
    copies = [gradient.clone()] if dtype.itemsize == 2 else []
    one = torch.ones((), device=at.device)
    weight, average, square = ([tensor] for tensor in tensors)
    on = adamw.Weights(weight, [gradient], average, square, copies, [0.1])
    rule = adamw.Rule(0.9, 0.95, 1e-8)
    yield Case(
        "adamw",
        (),
        lambda k: k.adamw(on, rule, steps=one.long(), rate=one * 1e-4, divisor=one, skip=one * 0),
        (adamw.bytes_moved(elements, torch.float32, dtype, dtype if copies else None),),
    )
    yield Case(
        "squared_norm",
        (gradient,),
        lambda k, t: k.squared_norm([t]),
        (elements * dtype.itemsize,),
    )


FAMILIES = (norms, activations, rotations, losses, updates)


def _peer(module: str, name: str) -> Any:
    """What a package that may be absent calls by this name; None: it does not."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # whatever a package of another platform raises as it is imported
        return None


def _found(**peers: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
    return {name: call for name, call in peers.items() if call is not None}


def peer_norms() -> dict[str, Callable[..., Any]]:
    """RMSNorm of liger-kernel and quack-kernels, where they are."""
    liger = _peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    quack = _peer("quack.rmsnorm", "rmsnorm")
    return _found(
        liger=liger and (lambda x, w: liger.apply(x, w, EPS)),
        quack=quack and (lambda x, w: quack(x, w, eps=EPS)),
    )


def peer_swiglu() -> dict[str, Callable[..., Any]]:
    """SwiGLU of liger-kernel, which takes gates and values apart."""
    liger = _peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    return _found(liger=liger and (lambda t: liger.apply(*t.chunk(2, dim=-1))))


def peer_loss(labels: Tensor) -> dict[str, Callable[..., Any]]:
    """Cross-entropy of liger-kernel, which leaves the gradient in the logits' place as well."""
    liger = _peer("liger_kernel.transformers.functional", "liger_cross_entropy")
    return _found(liger=liger and (lambda t: liger(t.detach().requires_grad_(), labels)))


class Clock:
    """Takes the time of works in turns.

    Args:
        device: "cpu" or "cuda".
        rounds: of all works.
        calls: of a work in one round.
    """

    def __init__(self, device: str, rounds: int, calls: int = 1) -> None:
        self.cuda = device == "cuda"
        self.rounds = rounds
        self.calls = calls

    def times(self, works: dict[str, Work]) -> dict[str, Took]:
        """Of a call of each."""
        wall: dict[str, list[float]] = {name: [] for name in works}
        used = dict.fromkeys(works, 0.0)
        for work in works.values():
            work()  # compiles, and touches the memory
            work()
        for turn in range(self.rounds):
            names = list(works)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.process_time()
                wall[name].append(self._milliseconds(works[name]))
                used[name] += (time.process_time() - began) * 1e3
        count = self.rounds * self.calls
        return {name: Took(statistics.median(wall[name]), used[name] / count) for name in works}

    def _milliseconds(self, work: Work) -> float:
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(self.calls):
                work()
            return (time.perf_counter() - began) * 1e3 / self.calls
        event: Any = torch.cuda.Event
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self.calls):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / self.calls


def works_of(case: Case, direction: str, fused: Kernels, compiled: bool) -> dict[str, Work]:
    """Name -> what is timed: the fused operation and all that it is compared with."""
    calls: dict[str, Callable[..., Any]] = {
        "fused": lambda *t: case.call(fused, *t),
        "eager": lambda *t: case.call(REFERENCE, *t),
        **case.peers,
    }
    if compiled:
        torch._dynamo.reset()
        calls["compile"] = torch.compile(lambda *t: case.call(REFERENCE, *t), dynamic=False)
    make = case.forward if direction == "forward" else case.backward
    return {name: make(call) for name, call in calls.items()}


def instructions(small: Case, direction: str, fused: Kernels, moved: int) -> float:
    """CPU milliseconds of the fused operation for `moved` bytes, had all of them been in the
    cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make = small.forward if direction == "forward" else small.backward
    work = make(lambda *t: small.call(fused, *t))
    took = Clock("cpu", 15, 40).times({"fused": work})["fused"]
    torch.set_num_threads(threads)
    return took.cpu * moved / small.moved[direction == "backward"]


def measure(
    case: Case, small: Case | None, dtype: torch.dtype, fused: Kernels, words: argparse.Namespace
) -> Iterator[Row]:
    """Both directions of a case.

    Args:
        case: of tensors larger than any cache.
        small: the same of tensors that lie in the cache; None: no such measurement.
        dtype: of the tensors.
        fused: the kernels.
        words: the command line.
    """
    clock = Clock(words.device, words.rounds, 20 if words.device == "cuda" else 1)
    for direction, moved in zip(("forward", "backward"), case.moved, strict=False):
        copied = torch.ones(moved // 2, dtype=torch.uint8, device=words.device)
        works = works_of(case, direction, fused, words.compile)
        times = clock.times({**works, "limit": copied.clone})
        own = None
        if small is not None:
            own = instructions(small, direction, fused, moved)
        yield Row(
            case.name,
            str(dtype).removeprefix("torch."),
            direction,
            times.pop("fused"),
            times.pop("limit"),
            own,
            times,
        )


HEAD = (
    f"{'':36} {'fused':>11} {'of limit':>8} {'by CPU':>6} {'instr.':>6}  ratios, by CPU time in ()"
)


def show(row: Row) -> None:
    """A line of the table."""
    alone = ""
    if row.instructions is not None:
        alone = f"{row.instructions / row.limit.cpu:6.0%}"
    others = "  ".join(
        f"{name} {row.ratio(name, WALL):.2f} ({row.ratio(name, CPU):.2f})" for name in row.others
    )
    print(
        f"{row.name:17} {row.dtype:9}{row.direction:9} {row.fused.wall:8.2f} ms"
        f" {row.share(WALL):8.0%} {row.share(CPU):6.0%} {alone:>6}  {others}",
        flush=True,
    )


def sizes(words: argparse.Namespace) -> list[tuple[Shapes, Shapes | None]]:
    """(large, in the cache) of every width."""
    if words.device == "cuda":
        wide = (4096,) if words.quick else (512, 2048, 4096, 8192, 16384)
        return [(Shapes(2**26 // width, width, 131072, "cuda"), None) for width in wide]
    widths = (1024,) if words.quick else (768, 4096)
    elements = 2**22 if words.quick else 2**24
    vocab = 50257
    return [
        (
            Shapes(elements // width, width, vocab, "cpu"),
            Shapes(CACHED // width, width, vocab, "cpu"),
        )
        for width in widths
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small tensors, bf16, no compiler")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="operations whose names begin so")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rows", type=Path, help="write the table's numbers into this file too")
    words = parser.parse_args()
    words.compile = words.compile and not words.quick
    print(describe(machine()), flush=True)
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    fused = choose("fused", words.device).kernels
    dtypes = (torch.bfloat16,) if words.quick else (torch.float32, torch.bfloat16)
    rows: list[Row] = []
    for large, little in sizes(words):
        print(f"\n{large.rows} x {large.width}\n{HEAD}")
        for family, dtype in itertools.product(FAMILIES, dtypes):
            cached = iter(()) if little is None else family(little, dtype)
            small = {case.name: case for case in cached}
            for case in family(large, dtype):
                if case.name.startswith(words.only):
                    for row in measure(case, small.get(case.name), dtype, fused, words):
                        rows.append(row)
                        show(row)
    for what, clock in (("wall clock", WALL), ("CPU time", CPU)):
        reached = sum(row.share(clock) >= GOALS[row.direction] for row in rows)
        faster = sum(row.ratio("eager", clock) >= 2 for row in rows)
        print(f"by the {what} {reached} of {len(rows)} reach the goal, {faster} are 2 x eager")
    if words.rows:
        words.rows.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
