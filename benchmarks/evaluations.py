"""Claim: with evaluations beside it, on a machine with a core to spare, training's median step
takes at most 2 % longer than without.

    python benchmarks/evaluations.py [--rounds 3] [--steps 300] [--threads 1]

A small model trains on one rank of one thread, by turns without and with an evaluation of every
checkpoint, so large that one is always under way. The ratio of each round is printed, and their
median: where other programs take the cores, rounds differ by more than the claim.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from trainkit.runs.evaluations import read_evaluations  # noqa: E402
from trainkit.runs.folder import RunFolder  # noqa: E402
from trainkit.runs.metrics import read_rows  # noqa: E402

JOBS = """
[clusters.here]
ranks_per_node = 1
node_folder = "{folder}/node"
env = {{ OMP_NUM_THREADS = "1" }}

[tokenizers.bpe]
type = "bpe"
vocab_size = 1024

[datasets.docs]
source = "files"
paths = ["docs.jsonl"]
tokenizer = "bpe"
split = "50,50,0"

[models.small]
num_layers = 4
hidden_size = 128
num_attention_heads = 4
seq_length = 64

[jobs.without]
cluster = "here"
model = "small"
dataset = "docs"
training.micro_batch_size = 8
training.global_batch_size = 8
training.train_iters = {steps}
training.lr = 1e-3
training.eval_iters = 0
training.save_interval = {interval}

[jobs.with]
extends = "without"
[[jobs.with.evaluations]]
name = "held-out"
every = {interval}
datasets = ["docs"]
limit = 100
threads = {threads}
"""


def step_ms(project: Path, job: str, skipped: int) -> tuple[float, float]:
    """(median of a step in milliseconds, seconds of evaluations) of a run of a job."""
    argv = [sys.executable, "-m", "invoke", "train", job]
    subprocess.run(argv, cwd=project, check=True, stdout=subprocess.DEVNULL)
    run = RunFolder(sorted((project / "runs" / job).iterdir())[-1])
    rows = [row for row in read_rows(run.metrics) if row["step"] > skipped]
    seconds = sum(record.seconds for record in read_evaluations(run))
    return statistics.median(float(row["elapsed_ms"] or 0) for row in rows), seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="of an evaluation")
    words = parser.parse_args()
    interval = max(1, words.steps // 6)
    with tempfile.TemporaryDirectory(prefix="trainkit-evaluations-") as name:
        project = Path(name)
        (project / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        asked = {"steps": words.steps, "interval": interval, "threads": words.threads}
        tables = JOBS.format(folder=name, **asked)
        (project / "jobs.toml").write_text(tables)
        with open(project / "docs.jsonl", "w") as file:
            for path in sorted((CHECKOUT / "docs").glob("*.md")):
                file.write(json.dumps({"text": path.read_text()}) + "\n")
        os.environ["PYTHONPATH"] = str(CHECKOUT)
        print(f"load average before: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
        print("| round | without, ms | with, ms | ratio | evaluations, s |")
        print("|---|---|---|---|---|")
        ratios = []
        for number in range(1, words.rounds + 1):
            before, _ = step_ms(project, "without", interval)
            beside, seconds = step_ms(project, "with", interval)
            ratios.append(beside / before)
            print(f"| {number} | {before:.1f} | {beside:.1f} | {ratios[-1]:.3f} | {seconds:.0f} |")
        print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
