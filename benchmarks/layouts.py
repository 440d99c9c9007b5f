"""Claim: on two cores no layout of two processes trains less than half as fast as one process with two threads, and where the time goes is told apart.

    python benchmarks/layouts.py [--quick] [--rows FILE]

Trains one model by the real trainer (`invoke train`, so threads are given as a user's run gives them) as one process of two threads, then as two processes
of one thread in every layout, several rounds in another order each. A ratio is the median over rounds of tokens/s over those of the one process in
the same round: a drifting machine moves both. Loss at the last step is that of the one process to 1e-4, or the run fails.

What a step is made of, in milliseconds of rank 0: `idle`, what a pipeline's stage waits between its forwards and backwards, transfers included (mean of both
ranks, beside the schedule's own bubble); `communication`, the time in which a collective was under way, from torch's profile of two further steps of the
same run (gloo's own spans, overlapping ones once); `compute`, the rest. The profiler makes its steps slower, so they are not in the others.

On one machine two processes can only lose: the same two cores do the same work, and the layouts' traffic goes through the loopback interface. What the
table is for is that the loss is known and has a name.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.cli.bench import describe, machine

LEAST = 0.5  # the claim
WARM = 2  # steps that are not counted
PROFILED = 2  # steps at the end, for the time of communication alone
TRANSFERS = ("gloo:send", "gloo:recv", "gloo:recvAnySource")  # between stages: these are in a pipeline's idle time
TP, PP, VIRTUAL = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"
ONE = "1 process x 2 threads"
LAYOUTS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "TP2": (TP,),
    "TP2 + SP": (TP, "sequence_parallel=true"),
    "PP2 1F1B": (PP,),
    "PP2 interleaved": (PP, VIRTUAL),
    "PP2 ZBV": (PP, 'pipeline_schedule="zbv"'),
    **{f"DP2 ZeRO {stage}": (f"zero_stage={stage}",) for stage in range(4)},
}
QUICK = (ONE, "TP2 + SP", "PP2 1F1B", "DP2 ZeRO 1")
JOBS_TOML = """
[clusters.here]
launcher = "local"
device = "cpu"
ranks_per_node = 2

[models.bench]
family = "llama"
num_layers = 8
hidden_size = 256
num_attention_heads = 4
seq_length = 256
vocab_size = 4096

[jobs.layouts]
cluster = "here"
model = "bench"
dataset = "mock"
training = { micro_batch_size = 2, global_batch_size = 16, train_iters = STEPS, lr = 1e-3, eval_iters = 0 }
profile = { start = FIRST, stop = STEPS }
"""


@dataclass(frozen=True)
class Run:
    """One run of one layout: means over the steps that count, milliseconds of rank 0."""

    tokens_per_second: float
    step: float
    communication: float
    idle: float
    bubble: float | None
    loss: float


def invoke(folder: Path, *words: str) -> str:
    """stdout of a task that must succeed."""
    done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"invoke {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def in_collectives(trace: Path) -> float:
    """Milliseconds a step in which a collective of this rank was under way."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    named = [e for e in events if str(e.get("name", "")).startswith("gloo:") and e["name"] not in TRANSFERS and "dur" in e]
    total, reached = 0.0, 0.0
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in named):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1000 / PROFILED


def run(folder: Path, layout: str) -> Run:
    """Train it."""
    sets = [f"parallelism.{word}" for word in LAYOUTS[layout]] + ([] if LAYOUTS[layout] else ["cluster.ranks_per_node=1"])
    words = [word for value in sets for word in ("--set", value)]
    made = Path(json.loads(invoke(folder, "train", "layouts", *words, "--share", "--json"))["folder"])
    rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if "eval" not in row][WARM:-PROFILED]
    step = statistics.fmean(row["elapsed_ms"] for row in counted)
    (trace,) = (made / "profile").glob("rank-0-*.json.gz")
    piped = [row["pipeline"] for row in counted if "pipeline" in row]
    busy = statistics.fmean(sum(row["times_ms"].get(name, 0.0) for name in ("forward", "backward", "pipeline")) for row in counted)
    return Run(
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in counted),
        step=step,
        communication=in_collectives(trace),
        idle=statistics.fmean(row["idle"] for row in piped) * busy if piped else 0.0,
        bubble=statistics.fmean(row["predicted_idle"] for row in piped) if piped else None,
        loss=rows[-1]["lm_loss"],
    )


def rounds_of(folder: Path, names: list[str], rounds: int) -> dict[str, list[Run]]:
    """All layouts, so many times, each round beginning with the next one."""
    found: dict[str, list[Run]] = {name: [] for name in names}
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(run(folder, name))
            print(f"  round {i + 1}: {name:24s} {found[name][-1].tokens_per_second:8,.0f} tokens/s", flush=True)
    return found


def table(found: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row a layout: medians, and ratios paired by round."""
    rows = []
    for name, runs in found.items():
        ratio = statistics.median(r.tokens_per_second / one.tokens_per_second for r, one in zip(runs, found[ONE], strict=True))
        row: dict[str, Any] = {"layout": name, "ratio": ratio, "loss_difference": max(abs(r.loss / found[ONE][0].loss - 1) for r in runs)}
        for key in ("tokens_per_second", "step", "communication", "idle", "bubble"):
            values = [value for r in runs if (value := getattr(r, key)) is not None]
            row[key] = statistics.median(values) if values else None
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, in the form of docs/benchmarks.md."""
    print("\n| layout | tokens/s | ratio | step ms | compute | communication | idle | idle of the step (its schedule's) | loss apart |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        compute = row["step"] - row["communication"] - row["idle"]
        parts = " | ".join(f"{part:,.0f}" for part in (row["step"], compute, row["communication"], row["idle"]))
        idle = "-" if row["bubble"] is None else f"{row['idle'] / row['step']:.0%} ({row['bubble']:.0%})"
        print(f"| {row['layout']} | {row['tokens_per_second']:,.0f} | {row['ratio']:.2f} | {parts} | {idle} | {row['loss_difference']:.0e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few layouts, one short round")
    parser.add_argument("--rows", type=Path, help="write the table as JSON into this file")
    words = parser.parse_args()
    print(describe(machine()), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        steps = WARM + (3 if words.quick else 6) + PROFILED
        (folder / "jobs.toml").write_text(JOBS_TOML.replace("STEPS", str(steps)).replace("FIRST", str(steps - PROFILED + 1)))
        rows = table(rounds_of(folder, list(QUICK if words.quick else LAYOUTS), 1 if words.quick else 3))
    show(rows)
    if words.rows:
        words.rows.write_text(json.dumps(rows))
    wrong = [f"{row['layout']}: {row['ratio']:.2f} of the one process" for row in rows if row["ratio"] < LEAST]
    wrong += [f"{row['layout']}: its loss is {row['loss_difference']:.1e} off" for row in rows if row["loss_difference"] > 1e-4]
    sys.exit(f"not as claimed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
