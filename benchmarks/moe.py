"""Claim: sending tokens to experts and putting their results together takes at most 10 % of a step
on one rank.

    python benchmarks/moe.py [--quick] [--threads N] [--rounds N] [--rows FILE]

One rank trains a Qwen3 with 16 experts, two of them taken, by the trainer's own step in fp32.
Dispatch is the router, the choice of experts, the losses of balance and the tokens' rows in the
order of experts; combine is the results in the order of tokens, weighted and summed; of both,
backward counts as well. What is between them, the experts' own products, counts as the rest of the
step. Shares are of the process's CPU time, medians over rounds. How long such a step takes beside
transformers' Qwen3-MoE, benchmarks/train_step.py says (--shape demo-qwen3-moe).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.cli.checkout.machine import describe, machine
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.runs.folder import new_run_folder
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.model.experts import Dispatched, MixtureOfExperts
from trainkit.train.parallel.data_parallel import World
from trainkit.train.trainer import Trainer

GOAL = 0.10
MANY = 2**20  # steps: the run has no last one
MODEL: dict[str, Any] = {
    "family": "qwen3-moe",
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "ffn_hidden_size": 704,
    "seq_length": 256,
    "vocab_size": 4096,
    "moe": {"num_experts": 16, "router_topk": 2, "ffn_hidden_size": 352},
}
PARTS = ("dispatch", "dispatch backward", "combine", "combine backward")


def trainer(folder: Path) -> Trainer:
    """Rank 0 of 1."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    training = Training(
        micro_batch_size=4,
        gradient_accumulation_steps=4,
        train_iters=MANY,
        lr=1e-4,
        lr_decay_style="constant",
        eval_iters=0,
        log_interval=MANY,
    )
    job = Job(
        name="bench",
        cluster=Cluster(
            name="here", device=built_in_device("cpu"), ranks_per_node=1, root=str(folder)
        ),
        model=Model(name="bench", **MODEL),
        dataset=Dataset(name="mock", source="mock"),
        training=training,
    )
    run = new_run_folder(folder, "bench")
    return Trainer(job, run, World(0, 1), Heartbeat(None, 0), threading.Event())


class _Mark(torch.autograd.Function):
    """Its input; backward calls `reached` when it comes here. Autograd goes through operations in
    the opposite order of forward, so all between two marks is between their calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.reached()
        return upstream[0], None


class Clock:
    """CPU seconds of the parts, which are watched from outside."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def watch(self) -> None:
        """From now on."""
        dispatched, combined = MixtureOfExperts.dispatched, MixtureOfExperts.combined

        def watched_dispatch(layer: MixtureOfExperts, x_BSH: Tensor, learns: bool) -> Dispatched:
            with self.part("dispatch"):
                sent = dispatched(layer, self._first(x_BSH, "dispatch"), learns)
            return sent._replace(rows_RH=self._last(sent.rows_RH, "dispatch"))

        def watched_combine(layer: MixtureOfExperts, y_RH: Tensor, sent: Dispatched) -> Tensor:
            with self.part("combine"):
                y_TH = combined(layer, self._first(y_RH, "combine"), sent)
            return self._last(y_TH, "combine")

        MixtureOfExperts.dispatched = watched_dispatch  # type: ignore[method-assign, assignment]
        MixtureOfExperts.combined = watched_combine  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done inside counts."""
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began

    def _first(self, x: Tensor, name: str) -> Tensor:
        """An input, where backward ends."""
        return self._marked(x, f"{name} backward", 1)

    def _last(self, x: Tensor, name: str) -> Tensor:
        """A result, where backward begins."""
        return self._marked(x, f"{name} backward", -1)

    def _marked(self, x: Tensor, name: str, sign: int) -> Tensor:
        def reached() -> None:
            self.seconds[name] += sign * time.process_time()

        marked: Tensor = _Mark.apply(x, reached)  # type: ignore[no-untyped-call]
        return marked


def measure(rounds: int) -> list[dict[str, float]]:
    """Of each round the step's CPU seconds and those of the parts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trained, clock = trainer(Path(folder)), Clock()
        clock.watch()
        for turn in range(rounds + 2):  # two that do not count
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            began = time.process_time()
            trained.train_step()
            if turn > 1:
                found.append({"step": time.process_time() - began, **clock.seconds})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=Path, help="write the rounds' seconds into this file too")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    print(describe(machine()), flush=True)
    rows = measure(2 if words.quick else words.rounds)
    step = statistics.median(row["step"] for row in rows)
    print(f"a step of 4,096 tokens, fp32, {words.threads} threads: {step:.2f} s of CPU time")
    for name in PARTS:
        share = statistics.median(row[name] / row["step"] for row in rows)
        print(f"{name:18} {share:6.1%}")
    whole = statistics.median(sum(row[name] for name in PARTS) / row["step"] for row in rows)
    judged = "holds" if whole <= GOAL else "does NOT hold"
    print(f"{'all of it':18} {whole:6.1%}: the claim, at most {GOAL:.0%}, {judged} here")
    if words.rows:
        words.rows.write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # the process group's threads may not end by themselves


if __name__ == "__main__":
    main()
