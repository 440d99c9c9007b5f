"""Claim: on two cores no layout of two processes trains less than two fifths as fast as one
process with two threads, and where the time goes is shown.

    python benchmarks/layouts.py [--quick] [--rows FILE]

Trains one model by the real trainer (`invoke train`, so threads are given as a user's run gives
them) as one process of two threads, then as two processes of one thread in every layout: three
rounds, every second one backwards. A ratio is the median over rounds of tokens/s over those of
the one process in the same round: a drifting machine moves both. Loss at the last step is that
of the one process to 1e-4, or the run fails. Two layouts of four processes, two a core, are
shown once and without a claim: there each waits for a core, too. One run takes half a minute on
two quiet cores, all some 16 minutes.

What a step is made of, in milliseconds of rank 0. From torch's profile of two further steps of
the first round, which are slower and so not in the others, and whose spans of gloo are matched
with the peer's by the one clock of the machine: `communication` is the time in which a
collective or a transfer was under way that both had begun, overlapping ones once; before the
other has come, it is `idle`. Under a pipeline receives are begun long before they are waited
for, so idle is what the stage's timers saw between its forwards and backwards, less the
transfers, mean of both ranks, and beside it stands the schedule's own bubble. `compute` is the
rest; of ZeRO, whose collectives run while it computes, less than what is computed. Of four
processes communication holds the waiting, too.

On one machine two processes can only lose: the same two cores do the same work, and the layouts'
traffic goes through the loopback interface. What the table is for is that the loss is known and
has a name.
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

from trainkit.cli.checkout.machine import describe, machine

LEAST = 0.4  # the claim
WARM = 2  # steps that are not counted
PROFILED = 2  # steps at the end, for the time of communication alone
ROUNDS = 3
OTHER_END = {"gloo:send": "gloo:recv", "gloo:recv": "gloo:send"}  # of collectives: the same
TP, PP, VIRTUAL = (
    "tensor_model_parallel_size=2",
    "pipeline_model_parallel_size=2",
    "virtual_pipeline_model_parallel_size=2",
)
ONE = "1 process x 2 threads"
LAYOUTS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "TP2": (TP,),
    "TP2 + SP": (TP, "sequence_parallel=true"),
    "PP2 1F1B": (PP,),
    "PP2 interleaved": (PP, VIRTUAL),
    "PP2 ZBV": (PP, 'pipeline_schedule="zbv"'),
    "DP2 ZeRO 0 (copies)": ("zero_stage=0",),
    **{f"DP2 ZeRO {stage}": (f"zero_stage={stage}",) for stage in (1, 2, 3)},
}
FOUR: dict[str, tuple[str, ...]] = {
    "TP2 + SP, PP2 1F1B": (TP, "sequence_parallel=true", PP),
    "HSDP 2x2 ZeRO 3": ("data_parallel_replicate_size=2", "zero_stage=3"),
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
seq_length = 128
vocab_size = 4096

[jobs.layouts]
cluster = "here"
model = "bench"
dataset = "mock"
training.micro_batch_size = 2
training.global_batch_size = 16
training.train_iters = STEPS
training.lr = 1e-3
training.eval_iters = 0

[jobs.profiled]
extends = "layouts"
profile = { start = FIRST, stop = STEPS }
"""


@dataclass(frozen=True)
class Run:
    """One run of one layout: means over the steps that count, milliseconds of rank 0. `waiting`:
    within collectives; `idle`: between a stage's work, transfers included. None: was not
    profiled."""

    tokens_per_second: float
    step: float
    communication: float | None
    waiting: float | None
    idle: float
    bubble: float | None
    loss: float


def invoke(folder: Path, *words: str) -> str:
    """stdout of a task that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "invoke", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"invoke {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def spans_of(trace: Path) -> dict[str, list[tuple[float, float]]]:
    """gloo's spans in order, by name: (begin, end) in microseconds of the machine's clock."""
    read = json.loads(gzip.decompress(trace.read_bytes()))
    base, found = read.get("baseTimeNanoseconds", 0) / 1000, dict[str, list[tuple[float, float]]]()
    for event in sorted(
        (
            e
            for e in read["traceEvents"]
            if str(e.get("name", "")).startswith("gloo:") and "dur" in e
        ),
        key=lambda e: float(e["ts"]),
    ):
        found.setdefault(event["name"], []).append(
            (base + event["ts"], base + event["ts"] + event["dur"])
        )
    return found


def length_of(spans: list[tuple[float, float]]) -> float:
    """Of their union."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def under_way(
    mine: dict[str, list[tuple[float, float]]], peer: dict[str, list[tuple[float, float]]] | None
) -> tuple[float, float]:
    """Milliseconds a step in which (something was under way that both ends had begun, this rank
    was in a collective that the peer had not begun)."""
    moving: list[tuple[float, float]] = []
    collective: list[tuple[float, float]] = []
    for name, spans in mine.items():
        others = spans if peer is None else peer.get(OTHER_END.get(name, name), [])
        if len(others) != len(spans):
            sys.exit(f"{len(spans)} spans of {name} on rank 0, {len(others)} on its peer")
        moving += [
            (min(end, max(start, begun)), end)
            for (start, end), (begun, _) in zip(spans, others, strict=True)
        ]
        collective += [] if name in OTHER_END else spans
    moved = length_of(moving)
    return moved / 1000 / PROFILED, (length_of(moving + collective) - moved) / 1000 / PROFILED


def run(folder: Path, layout: str, *, profiled: bool) -> Run:
    """Train it."""
    ranks = 1 if layout == ONE else 4 if layout in FOUR else 2
    seen = [0, 1] if ranks == 2 else [0]
    sets = [f"parallelism.{word}" for word in {**LAYOUTS, **FOUR}[layout]] + [
        f"cluster.ranks_per_node={ranks}",
        *([f"profile.ranks={seen}"] if profiled else []),
    ]
    words = [word for value in sets for word in ("--set", value)]
    made = Path(
        json.loads(
            invoke(
                folder, "train", "profiled" if profiled else "layouts", *words, "--share", "--json"
            )
        )["folder"]
    )
    rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if "eval" not in row][WARM:-PROFILED]
    communication, waiting = None, None
    if profiled:
        traces = [
            spans_of(next((made / "profile").glob(f"rank-{rank}-*.json.gz"))) for rank in seen
        ]
        communication, waiting = (
            under_way(traces[0], traces[1] if ranks == 2 else None) if ranks > 1 else (0.0, 0.0)
        )
    piped = [row["pipeline"] for row in counted if "pipeline" in row]
    busy = statistics.fmean(
        sum(row["times_ms"].get(name, 0.0) for name in ("forward", "backward", "pipeline"))
        for row in counted
    )
    return Run(
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in counted),
        step=statistics.fmean(row["elapsed_ms"] for row in counted),
        communication=communication,
        waiting=waiting,
        idle=statistics.fmean(row["idle"] for row in piped) * busy if piped else 0.0,
        bubble=statistics.fmean(row["predicted_idle"] for row in piped) if piped else None,
        loss=rows[-1]["lm_loss"],
    )


def rounds_of(folder: Path, names: list[str], rounds: int) -> dict[str, list[Run]]:
    """All layouts, so many times, there and back; those of four processes in the first round
    alone."""
    found: dict[str, list[Run]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: -1 if i % 2 else 1]:
            if name in FOUR and i:
                continue
            found[name].append(run(folder, name, profiled=i == 0))
            print(
                f"  round {i + 1}: {name:24s} {found[name][-1].tokens_per_second:8,.0f} tokens/s",
                flush=True,
            )
    return found


def table(found: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row a layout: medians, and ratios paired by round."""
    rows = []
    for name, runs in found.items():
        ratio = statistics.median(
            r.tokens_per_second / one.tokens_per_second
            for r, one in zip(runs, found[ONE], strict=False)
        )
        row: dict[str, Any] = {
            "layout": name,
            "processes": 4 if name in FOUR else 2,
            "ratio": ratio,
        }
        row["loss_difference"] = max(abs(r.loss / found[ONE][0].loss - 1) for r in runs)
        for key in ("tokens_per_second", "step", "communication", "waiting", "idle", "bubble"):
            values = [value for r in runs if (value := getattr(r, key)) is not None]
            row[key] = statistics.median(values) if values else None
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, in the form of docs/benchmarks.md."""
    print(
        "\n| layout | tokens/s | ratio | step ms | compute | communication | idle | idle of the"
        " step (its schedule's) | loss apart |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        moving = row["communication"]
        # transfers behind computing hold nobody up: only what falls between a stage's work counts
        if row["layout"].startswith("PP2"):
            moving = min(moving, row["idle"])
        waits = row["waiting"] + max(0.0, row["idle"] - moving) if row["idle"] else row["waiting"]
        parts = " | ".join(
            f"{part:,.0f}" for part in (row["step"], row["step"] - moving - waits, moving, waits)
        )
        idle = f"{waits / row['step']:.0%}" + (
            "" if row["bubble"] is None else f" ({row['bubble']:.0%})"
        )
        print(
            f"| {row['layout']} | {row['tokens_per_second']:,.0f} | {row['ratio']:.2f} | {parts} |"
            f" {idle} | {row['loss_difference']:.0e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few layouts, one short round")
    parser.add_argument("--rows", type=Path, help="write the table as JSON into this file")
    words = parser.parse_args()
    print(describe(machine()), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        steps = WARM + (3 if words.quick else 4) + PROFILED
        (folder / "jobs.toml").write_text(
            JOBS_TOML.replace("STEPS", str(steps)).replace("FIRST", str(steps - PROFILED + 1))
        )
        rows = table(
            rounds_of(
                folder,
                list(QUICK if words.quick else {**LAYOUTS, **FOUR}),
                1 if words.quick else ROUNDS,
            )
        )
    show(rows)
    if words.rows:
        words.rows.write_text(json.dumps(rows))
    wrong = [
        f"{row['layout']}: {row['ratio']:.2f} of the one process"
        for row in rows
        if row["ratio"] < LEAST and row["processes"] == 2
    ]
    wrong += [
        f"{row['layout']}: its loss is {row['loss_difference']:.1e} off"
        for row in rows
        if row["loss_difference"] > 1e-4
    ]
    sys.exit(f"not as claimed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
