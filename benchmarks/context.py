"""Claim: two ranks that share each sample hold at most 5 % more memory each than the plan says, and
train no less than two fifths as fast as one process with two threads.

    python benchmarks/context.py [--length 4096] [--rounds 3] [--quick] [--rows FILE]

Trains one model on samples of that many tokens by the real trainer (`invoke train`): as one process
of two threads, then as two processes of one thread with context parallelism by a ring and by heads
("p2p", "a2a"), round after round, every second one backwards. Tokens/s are those of the median
step, and ratios are within a round. Memory is the most that rank 0 held, by its last row, beside
the plan's total and its part for activations. Loss at the last step is that of one process to
1e-4, or the run fails. Nobody stands beside: torch's own context_parallel has no attention for the
CPU (2.13), Megatron-LM's needs Transformer Engine and CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from benchmarks.layouts import invoke  # noqa: E402
from trainkit.cli.checkout.machine import describe, machine  # noqa: E402

LEAST, MOST_MEMORY = 0.4, 1.05  # the claim
WARM = 3  # steps that are not counted
ONE = "1 process x 2 threads"
LAYOUTS: dict[str, tuple[str, ...]] = {
    ONE: ("cluster.ranks_per_node=1",),
    **{
        f"CP2 {how}": ("parallelism.context_parallel_size=2", f'parallelism.cp_comm_type="{how}"')
        for how in ("p2p", "a2a")
    },
}
JOBS_TOML = """
[clusters.here]
launcher = "local"
device = "cpu"
ranks_per_node = 2

[models.bench]
family = "llama"
num_layers = 4
hidden_size = 512
num_attention_heads = 8
num_query_groups = 4
seq_length = LENGTH
vocab_size = 4096

[jobs.context]
cluster = "here"
model = "bench"
dataset = "mock"
training.micro_batch_size = 1
training.global_batch_size = 1
training.train_iters = STEPS
training.lr = 1e-3
training.eval_iters = 0
training.log_interval = 1
"""


@dataclass(frozen=True)
class Run:
    """One run of one layout. `planned`: bytes of a rank, `activations` of them."""

    tokens_per_second: float
    held: int
    planned: int
    activations: int
    loss: float


def run(folder: Path, layout: str) -> Run:
    """Train it."""
    words = [word for value in LAYOUTS[layout] for word in ("--set", value)]
    made = json.loads(invoke(folder, "train", "context", *words, "--share", "--json"))
    path = Path(made["folder"])
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((path / "plan.json").read_text())["memory"]["fullest_rank"]
    return Run(
        median(row["tokens_per_second"] for row in rows[WARM:]),
        rows[-1]["memory_bytes"]["max_resident"],
        plan["total_bytes"],
        plan["activation_bytes"],
        rows[-1]["lm_loss"],
    )


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="What it costs to share samples among ranks.")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, samples of 512 tokens")
    parser.add_argument("--rows", type=Path, help="write what was measured here, as JSON")
    words = parser.parse_args()
    length, rounds = (512, 1) if words.quick else (words.length, words.rounds)
    found: dict[str, list[Run]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        text = JOBS_TOML.replace("LENGTH", str(length)).replace("STEPS", str(WARM + 8))
        Path(folder, "jobs.toml").write_text(text)
        Path(folder, "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        for number in range(rounds):
            for layout in list(LAYOUTS)[:: -1 if number % 2 else 1]:
                found[layout].append(run(Path(folder), layout))
    print(describe(machine()))
    print(
        f"{'layout':24}{'tokens/s':>10}{'ratio':>8}{'held':>10}{'planned':>10}{'activations':>13}"
    )
    rows: list[dict[str, Any]] = []
    for layout, runs in found.items():
        pairs = list(zip(runs, found[ONE], strict=True))
        if any(abs(mine.loss / alone.loss - 1) > 1e-4 for mine, alone in pairs):
            sys.exit(f"{layout}: the loss is another one")
        ratio = median(mine.tokens_per_second / alone.tokens_per_second for mine, alone in pairs)
        speed, held = median(r.tokens_per_second for r in runs), median(r.held for r in runs)
        row = {
            "layout": layout,
            "tokens_per_second": speed,
            "ratio": ratio,
            "held_bytes": held,
            "planned_bytes": runs[0].planned,
        }
        rows.append(row)
        mib = [f"{value / 2**20:.0f} MiB" for value in (held, runs[0].planned, runs[0].activations)]
        print(f"{layout:24}{speed:10.0f}{ratio:8.2f}{mib[0]:>10}{mib[1]:>10}{mib[2]:>13}")
    if words.rows:
        words.rows.write_text(json.dumps({"machine": machine(), "rows": rows}))
    most = {row["layout"]: MOST_MEMORY * row["planned_bytes"] for row in rows}
    bad = [r for r in rows if r["ratio"] < LEAST or r["held_bytes"] > most[r["layout"]]]
    if bad and not words.quick:
        sys.exit(f"the claim does not hold: {', '.join(r['layout'] for r in bad)}")


if __name__ == "__main__":
    main()
