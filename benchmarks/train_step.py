"""Claim: a training step is at least as fast as a plain PyTorch loop over transformers' GPT-2 or
litgpt's GPT.

    python benchmarks/train_step.py [--quick] [--device cuda] [--shape NAME] [--precision NAME]

One step is forward, backward, clipping to norm 1, AdamW and zero_grad, over random tokens,
without dropout. Each contender is a process of its own that steps when asked. On the CPU they
take turns, in another order every round, with 2 threads each, and a ratio is the median over the
rounds of the peer's seconds over trainkit's in the same round: above 1 trainkit is faster. On a
machine that others use too a second thread that has to wait for its core takes the first one's
time; `by CPU time` is the same ratio of the processes' own CPU seconds, which shows how much
work a step is (best with --threads 1: threads that wait for one another count as working). On
CUDA they run one after the other.

The limit is that of the matrix products alone: the same round times those of a step (their
shapes, layouts and dtype) with nothing between them, and takes the FLOPs of the whole step,
attention's causal ones too, at that rate. On CUDA it is the peak of the device table (MFU).

Contenders, all with fp32 master weights and moments unless their name says otherwise:
  trainkit           the Trainer's own step as `invoke train` runs it: data, agreement of ranks,
  guard and logging's numbers are in its time,
                     the peers get their tokens for nothing. bf16: parameters are cast once a
                     step, products and residual stream are bf16.
  transformers       GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM, SDPA attention, loss
  as the model
  computes it, clip_grad_norm_, AdamW(fused=True).
                     bf16: torch.autocast.
  litgpt             its GPT with the loss of its pretraining (chunked_cross_entropy), the same
  loop. It has no learned positions: for the GPT-2
                     shapes a GPT of equal width and depth with 25 % rotary positions and a tied
                     head, as its Pythia but for the parallel residual; its vocabulary is padded
                     to a multiple of 128. For the Llama and Qwen3 shapes its own.
                     bf16:
                     torch.autocast, what its pretraining does.
  trainkit, plain torch kernels; plain loop
                     of benchmarks/gpu alone: kernels = "reference"; peers/plain_model.py, compiled
  ... bf16 weights   the same loop over a model cast to bf16: weights, gradients and moments lose
  their fp32, so it is shown, not compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainkit.cli.checkout.machine import describe, machine
from trainkit.engines.native import kept_heap

PEERS = ("transformers", "litgpt")


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        model: keys of a [models.X] table.
        micro_batch: samples of one forward.
        accumulation: micro-batches of a step.
        rounds: steps that are timed.
        recompute: training.recompute_granularity.
        peers: who else takes part: those that have such a model and fit the device.
    """

    model: dict[str, Any]
    micro_batch: int
    accumulation: int
    rounds: int
    recompute: str = "none"
    peers: tuple[str, ...] = PEERS

    @property
    def words(self) -> str:
        """For the contenders' program."""
        return json.dumps(
            {
                "model": self.model,
                "micro_batch": self.micro_batch,
                "accumulation": self.accumulation,
                "recompute": self.recompute,
            }
        )

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.micro_batch * self.accumulation * int(self.model["seq_length"])


GPT2 = {
    "family": "gpt",
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 1024,
    "vocab_size": 50257,
}
DEMO = {
    "family": "gpt",
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 4096,
}
DEMO_LLAMA = {
    **DEMO,
    "family": "llama",
    "num_query_groups": 2,
    "ffn_hidden_size": 704,
}
# the vocabulary is what litgpt would pad it to: all contenders have as many parameters
QWEN3 = {
    "family": "qwen3",
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_query_groups": 4,
    "kv_channels": 64,
    "ffn_hidden_size": 2432,
    "seq_length": 1024,
    "vocab_size": 50304,
    "untie_embeddings_and_output_weights": False,
}
DEMO_QWEN3 = {
    **QWEN3,
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 704,
    "seq_length": 256,
    "vocab_size": 4096,
}
# as many active parameters
DEMO_QWEN3_MOE = {
    **DEMO_QWEN3,
    "family": "qwen3-moe",
    "moe": {"num_experts": 16, "router_topk": 2, "ffn_hidden_size": 352},
}
LLAMA = {
    "family": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
}
CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "demo": Case(DEMO, 4, 4, 15),
        "demo-llama": Case(DEMO_LLAMA, 4, 4, 15),
        "gpt2-124m": Case(GPT2, 1, 1, 7),
        "demo-qwen3": Case(DEMO_QWEN3, 4, 4, 15),
        "qwen3-124m": Case(QWEN3, 1, 1, 7),
        "demo-qwen3-moe": Case(DEMO_QWEN3_MOE, 4, 4, 15, peers=("transformers",)),
    },
    "cuda": {
        "gpt2-124m": Case(GPT2, 32, 4, 20),
        # 16 bytes a parameter: 128 GB. With autocast's copies on top a peer does not fit.
        "llama-8b": Case(
            {**LLAMA, "seq_length": 4096, "vocab_size": 128256, "rotary_base": 500000.0},
            1,
            1,
            10,
            recompute="full",
            peers=(),
        ),
    },
}
QUICK = {"cpu": (("demo", 3),), "cuda": (("gpt2-124m", 5),)}
CONTENDERS = Path(__file__).parent / "peers" / "train_step.py"


class Failed(Exception):
    """A contender's process ended; the text is its last words."""


class Worker:
    """A contender in its process."""

    def __init__(self, name: str, case: Case, precision: str, device: str, threads: int) -> None:
        self.name = name
        argv = [
            sys.executable,
            "-P",
            str(CONTENDERS),
            name,
            case.words,
            precision,
            device,
            str(threads),
        ]
        env = {**os.environ}
        if device == "cpu":
            env["OMP_NUM_THREADS"] = str(threads)
            if name == "trainkit":
                env |= kept_heap(env)  # as its ranks have it
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.tail: deque[str] = deque(maxlen=12)
        assert self.process.stderr is not None
        self.reader = threading.Thread(target=self._drain, args=(self.process.stderr,), daemon=True)
        self.reader.start()
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.peak = 0
        self.about: dict[str, Any] = {}

    def _drain(self, stream: IO[str]) -> None:
        self.tail.extend(line.rstrip() for line in stream)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.reader.join(5)
            raise Failed("\n".join(f"    | {words}" for words in self.tail))
        return dict(json.loads(line))

    def ready(self) -> None:
        """Wait until it has taken its first steps."""
        self.about = self._answer()

    def step(self, count: int = 1) -> None:
        """Have it take so many steps; `seconds` gets those of one."""
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)
        answer = self._answer()
        self.seconds.append(answer["seconds"] / count)
        self.cpu_seconds.append(answer["cpu_seconds"] / count)
        self.peak = max(self.peak, answer["peak_bytes"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def contenders(case: Case, precision: str) -> list[str]:
    """Who takes part."""
    pure = [f"{name}, bf16 weights" for name in case.peers if precision == "bf16"]
    return ["trainkit", *case.peers, *pure]


class Field:
    """Those who take part, until they fail.

    Args:
        workers: all of them.
    """

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.failures = workers, list[str]()

    def all(self, order: Iterable[Worker], do: Callable[[Worker], None]) -> None:
        """Have each do something, in this order; who fails leaves."""
        for worker in list(order):
            try:
                do(worker)
            except Failed as error:
                self.workers.remove(worker)
                self.failures.append(f"  {worker.name} failed:\n{error}")


def alternate(names: list[str], words: tuple[Any, ...], rounds: int) -> Field:
    """All of them side by side, in turns."""
    field = Field([Worker(name, *words) for name in names])
    field.all(field.workers, Worker.ready)
    for i in range(rounds):
        turn = i % max(1, len(field.workers))
        field.all(field.workers[turn:] + field.workers[:turn], Worker.step)
    field.all(field.workers, Worker.end)
    return field


def one_by_one(names: list[str], words: tuple[Any, ...], rounds: int) -> Field:
    """Each alone on the device: as many steps in a row as there are rounds, without a stop
    between them, three times."""

    def run(worker: Worker) -> None:
        worker.ready()
        for _ in range(3):
            worker.step(rounds)
        worker.end()

    field = Field([])
    for name in names:
        field.workers.append(Worker(name, *words))
        field.all(field.workers[-1:], run)
    return field


def gpu_peak(precision: str) -> tuple[float | None, int]:
    """(FLOP/s that the device table gives for this GPU, None for one it does not know; bytes of
    memory)."""
    import torch

    from trainkit.jobs.devices import reported_device

    row = reported_device(torch.cuda.get_device_name())
    peaks = {str(name): tflops for name, tflops in row.peak_tflops.items()} if row else {}
    peak = peaks.get(precision)
    return peak * 1e12 if peak else None, int(torch.cuda.get_device_properties(0).total_memory)


def rows_of(
    workers: list[Worker], case_name: str, precision: str, device: str
) -> list[dict[str, Any]]:
    """One row a contender: medians, and ratios paired by round."""
    case, found = CASES[device][case_name], {w.name: w for w in workers}
    ours, products = found.get("trainkit"), found.pop("products", None)
    peak = gpu_peak(precision)[0] if device == "cuda" else None
    rows = []
    for name, worker in found.items():
        flops, seconds = worker.about["flops_per_token"], statistics.median(worker.seconds)
        row: dict[str, Any] = {
            "shape": case_name,
            "precision": precision,
            "contender": name,
            "tokens_per_second": case.tokens / seconds,
        }
        if products:  # seconds of this contender's FLOPs at the products' rate
            limits = [p * flops / products.about["flops_per_token"] for p in products.seconds]
            row["limit_tokens_per_second"] = case.tokens / statistics.median(limits)
            row["share"] = statistics.median(
                limit / s for limit, s in zip(limits, worker.seconds, strict=True)
            )
        elif peak:
            row["limit_tokens_per_second"], row["share"] = (
                peak / flops,
                case.tokens / seconds * flops / peak,
            )
        row["ratio"] = (
            statistics.median(s / o for s, o in zip(worker.seconds, ours.seconds, strict=True))
            if ours
            else None
        )
        row["cpu_ratio"] = (
            statistics.median(
                s / o for s, o in zip(worker.cpu_seconds, ours.cpu_seconds, strict=True)
            )
            if ours
            else None
        )
        row |= {
            "parameters": worker.about["parameters"],
            "flops_per_token": flops,
            "peak_bytes": worker.peak,
            "first_loss": worker.about["first_loss"],
        }
        row |= {
            "seconds": worker.seconds,
            "cpu_seconds": worker.cpu_seconds,
            "compared": "bf16 weights" not in name,
        }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], device: str) -> None:
    """The table of one cell."""
    share = "MFU" if device == "cuda" else "of limit"
    head = f"{'':28} {'tokens/s':>9} {'ratio':>6} {'by CPU time':>11} {'limit':>9} {share:>8}"
    print(f"{head} {'parameters':>13} {'MFLOP/token':>11} {'peak memory':>11} {'first loss':>10}")
    for row in rows:
        limit, part = (
            f"{row[key]:{form}}" if key in row else "n/a"
            for key, form in (("limit_tokens_per_second", ",.0f"), ("share", ".0%"))
        )
        ratio, cpu = (
            "-" if row["contender"] == "trainkit" or row[key] is None else f"{row[key]:.2f}"
            for key in ("ratio", "cpu_ratio")
        )
        print(
            f"{row['contender']:28} {row['tokens_per_second']:9,.0f} {ratio:>6} {cpu:>11}"
            f" {limit:>9} {part:>8} {row['parameters']:13,} {row['flops_per_token'] / 1e6:11,.0f}"
            f" {row['peak_bytes'] / 2**30:7.2f} GiB {row['first_loss']:10.3f}"
        )


def run_cell(
    case_name: str, precision: str, device: str, threads: int, rounds: int
) -> tuple[list[dict[str, Any]], bool]:
    """(rows of one shape and precision, whether everyone came through)."""
    case = CASES[device][case_name]
    what = (
        f"{case_name}, {precision}: {case.micro_batch} x {case.model['seq_length']} tokens x"
        f" {case.accumulation} micro-batches a step"
    )
    how = (
        f"{rounds} rounds, {threads} threads"
        if device == "cpu"
        else f"3 x {rounds} steps, compiled, recompute {case.recompute}"
    )
    print(f"\n{what}; {how}", flush=True)
    words = (case, precision, device, threads)
    names = contenders(case, precision)
    field = (
        alternate([*names, "products"], words, rounds)
        if device == "cpu"
        else one_by_one(names, words, rounds)
    )
    rows = rows_of(field.workers, case_name, precision, device)
    show(rows, device)
    if not case.peers:
        print(
            "  no peers: 16 bytes a parameter and a second copy of the weights in bf16 do not fit"
        )
    for failure in field.failures:
        print(failure)
    return rows, not field.failures


def too_small(case: Case) -> str:
    """Why a case does not fit the GPU; "" if it does."""
    from trainkit.jobs.schema import Model
    from trainkit.plan.arithmetic import parameters_of

    needed, there = (
        16 * parameters_of(Model(name="bench", **case.model), case.model["vocab_size"]),
        gpu_peak("bf16")[1],
    )
    return (
        f"needs {needed / 1e9:.0f} GB for weights, gradients and moments, the GPU has"
        f" {there / 1e9:.0f} GB"
        if needed > there
        else ""
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """The claim, judged."""
    ratios = [
        (row["ratio"], row)
        for row in rows
        if row["compared"] and row["contender"] != "trainkit" and row["ratio"] is not None
    ]
    if not ratios:
        return "no peer to compare with"
    lowest, row = min(ratios, key=lambda pair: pair[0])
    where = f"{row['contender']} at {row['shape']} in {row['precision']}"
    return (
        f"lowest ratio {lowest:.2f} ({where}): the claim"
        f" {'holds' if lowest >= 1 else 'does NOT hold'} here"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: the smallest shape, few rounds"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", help="only this one")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="only this one")
    parser.add_argument("--rounds", type=int, help="instead of the shape's own number")
    parser.add_argument("--threads", type=int, default=2, help="of every contender on the CPU")
    parser.add_argument(
        "--rows", type=Path, help="write the tables' numbers into this file as well"
    )
    words = parser.parse_args()
    print(describe(machine()), flush=True)
    cases = (
        dict(QUICK[words.device])
        if words.quick
        else {name: case.rounds for name, case in CASES[words.device].items()}
    )
    precisions = (
        [words.precision]
        if words.precision
        else ["fp32", "bf16"]
        if words.device == "cpu"
        else ["bf16"]
    )
    rows: list[dict[str, Any]] = []
    whole = True
    for name, rounds in cases.items():
        if words.shape not in (None, name):
            continue
        if words.device == "cuda" and (why := too_small(CASES["cuda"][name])):
            print(f"\n{name} {why}: left out")
            continue
        for precision in precisions:
            found, through = run_cell(
                name, precision, words.device, words.threads, words.rounds or rounds
            )
            rows, whole = rows + found, whole and through
    print(f"\n{verdict(rows)}{'' if whole else ', as far as they came through'}")
    if words.rows:
        words.rows.write_text(json.dumps(rows))
    sys.exit(not whole)


if __name__ == "__main__":
    main()
