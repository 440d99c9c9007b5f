"""Claim: a step with Muon takes at most 1.10 times one with AdamW, at 64k tokens a step of GPT-2
124M, and Newton-Schulz iterations run at the rate of their matrix products.

    python benchmarks/muon.py [--quick] [--device cuda] [--precision bf16] [--tokens N]

One rank, trainkit's own model and optimizer. A step is `--tokens` tokens in micro-batches and one
update: of the micro-batches one is timed, forward and backward, and counts as often as there are
some, for on a CPU all of them take minutes. Updates take turns, in every round one of each: AdamW
of all parameters, Muon of the blocks' matrices with AdamW of the rest, and the same by torch.optim
(Muon always in bf16, which splits no fused projection; AdamW fused). A ratio is of whole steps over
AdamW's, of medians; "CPU" is the same by the process's CPU time, for a machine with other work on
it (then best with --threads 1). Then the iterations of each shape of matrix beside their bare
products, in FLOP/s: 5 (4 m m n + 2 m m m) FLOPs for m rows and n columns, m the fewer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.cli.checkout.machine import describe, machine
from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Model, Training
from trainkit.ops.kernels import choose
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.shards import sharded_parameters
from trainkit.train.update.muon import DTYPES, Matrices, items_of, orthogonal
from trainkit.train.update.optimizer import Optimizer

GOAL = 1.10
VOCAB = 50257
Work = Callable[[], object]


class Took(NamedTuple):
    """Seconds by the wall clock, and of the process's CPU time."""

    wall: float
    cpu: float


def clock(works: dict[str, Work], rounds: int, device: str) -> dict[str, Took]:
    """Medians over rounds in turns, after one that does not count."""
    times: dict[str, list[Took]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            if device == "cuda":
                torch.cuda.synchronize()
            wall = time.perf_counter()
            cpu = time.process_time()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(Took(time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: Took(*(statistics.median(clocks) for clocks in zip(*each[1:], strict=True)))
        for name, each in times.items()
    }


def training_of(optimizer: str, precision: str) -> Training:
    return Training(
        micro_batch_size=1,
        train_iters=1,
        lr=1e-4,
        optimizer=optimizer,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
    )


def matrices_of(module: Transformer) -> dict[str, torch.nn.Parameter]:
    """The parameters that Muon updates."""
    return {n: p for n, p in module.named_parameters() if role_of(n, p.dim()) == "matrix"}


def updates(
    model: Model, module: Transformer, words: argparse.Namespace
) -> Iterator[tuple[str, Work]]:
    """One update of each contender; gradients are there, and stay."""
    kernels = choose("auto", words.device).kernels
    sharded = sharded_parameters(module, 1)
    parameters = {name: each.parameter for name, each in sharded.items()}
    whole = Matrices(model, {name: sharded[name] for name in matrices_of(module)})
    one = torch.ones((), device=words.device)
    for name in ("adam", "muon"):
        matrices = [whole] if name == "muon" else []
        ours = Optimizer(parameters, training_of(name, words.precision), kernels, matrices)
        yield name, lambda ours=ours: ours.step(one * 1e-4, one, one * 0)  # type: ignore[misc]
    if words.peer:
        muon = torch.optim.Muon(matrices_of(module).values(), lr=1e-4)
        rest = [p for n, p in module.named_parameters() if n not in matrices_of(module)]
        adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)
        yield "torch.optim", lambda: (muon.step(), adamw.step())  # type: ignore[no-untyped-call]


def micro_batch(model: Model, words: argparse.Namespace) -> Work:
    """Forward and backward of `--micro-batch` samples, in the training's arithmetic."""
    dtype = DTYPES[words.precision]
    kernels = choose("auto", words.device).kernels
    module = Transformer(model, VOCAB, kernels).to(words.device, dtype)
    ids_BS = torch.randint(VOCAB, (words.micro_batch, model.seq_length), device=words.device)

    def work() -> None:
        module(ids_BS, Labels(ids_BS)).objective.backward()

    return work


def products(x_MN: Tensor) -> Work:
    """The products of five iterations, and nothing else."""
    gram_MM = x_MN @ x_MN.T

    def work() -> None:
        for _ in range(5):
            torch.mm(x_MN, x_MN.T)
            torch.mm(gram_MM, gram_MM)
            torch.mm(gram_MM, x_MN)

    return work


def show_rates(model: Model, module: Transformer, words: argparse.Namespace) -> None:
    """The iterations beside their products."""
    t = training_of("muon", words.precision)
    shapes = Counter(
        (rows, p.shape[1])
        for name, p in matrices_of(module).items()
        for item in items_of(name, tuple(p.shape), model)
        for rows in item.parts
    )
    print(f"\n{'matrices':>16} {'iterations':>14} {'of products':>11}   (of products by CPU)")
    for (m, n), count in shapes.items():
        u_MN = torch.randn(m, n, device=words.device)
        least = min(m, n)
        x_MN = torch.randn(least, max(m, n), device=words.device).to(DTYPES[words.precision]) / n
        works: dict[str, Work] = {
            "iterations": lambda u_MN=u_MN: orthogonal(u_MN, t),  # type: ignore[misc]
            "products": products(x_MN),
        }
        took = clock(works, words.rounds, words.device)
        ours = took["iterations"]
        bare = took["products"]
        flops = 5 * (4 * least * least * max(m, n) + 2 * least**3)
        print(
            f"{f'{count} of {m}x{n}':>16} {flops / ours.wall / 1e9:8,.0f} GF/s"
            f" {bare.wall / ours.wall:11.0%}   ({bare.cpu / ours.cpu:.0%})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one layer, one round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=2**16, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of 1,024 tokens")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="no torch.optim")
    words = parser.parse_args()
    if words.quick:
        words.layers = words.rounds = 1
    print(describe(machine()), flush=True)
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    model = Model(
        name="bench",
        family="gpt",
        num_layers=words.layers,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=1024,
        vocab_size=VOCAB,
    )
    module = Transformer(model, VOCAB).to(words.device)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    works = {"micro-batch": micro_batch(model, words), **dict(updates(model, module, words))}
    took = clock(works, words.rounds, words.device)
    batch = took.pop("micro-batch")
    times = words.tokens / (words.micro_batch * model.seq_length)
    print(f"\n{words.layers} layers, {words.precision}, {words.tokens:,} tokens a step:")
    print(f"{'':12} {'update':>9} {'whole step':>10} {'ratio':>6}   (CPU: update, ratio)")
    for name, update in took.items():
        step = Took(*(times * b + u for b, u in zip(batch, update, strict=True)))
        adam = Took(*(times * b + u for b, u in zip(batch, took["adam"], strict=True)))
        print(
            f"{name:12} {update.wall:7.2f} s {step.wall:8.1f} s {step.wall / adam.wall:6.3f}"
            f"   ({update.cpu:.2f} s, {step.cpu / adam.cpu:.3f})",
            flush=True,
        )
    show_rates(model, module, words)
    print(f"the goal is {GOAL} for Muon's whole step")


if __name__ == "__main__":
    main()
