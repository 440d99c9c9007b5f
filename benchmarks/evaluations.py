"""Claim: with an evaluation beside it, on a machine with a core to spare, training's median step
takes at most 2 % longer than without.

    python benchmarks/evaluations.py [--evaluations 10] [--interval 200]

A small model trains on one rank of one thread, and its checkpoints are evaluated by a process of
one thread. The steps of one run are compared: those after each checkpoint while its evaluation is
under way, with as many after that has ended, so that a machine whose speed drifts slows both. The
steps until the evaluation begins, when the checkpoint is being written, count for neither. The
ratio of each checkpoint is printed, and their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from trainkit.runs.evaluations import read_evaluations  # noqa: E402
from trainkit.runs.folder import RunFolder  # noqa: E402
from trainkit.runs.metrics import newest_row, read_rows  # noqa: E402

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

[jobs.measured]
cluster = "here"
model = "small"
dataset = "docs"
training.micro_batch_size = 8
training.global_batch_size = 8
training.train_iters = {steps}
training.lr = 1e-3
training.eval_iters = 0
training.save_interval = {interval}
[[jobs.measured.evaluations]]
name = "held-out"
every = {interval}
datasets = ["docs"]
"""


def states(project: Path, interval: int) -> dict[int, str]:
    """Train the job; by step whether, when its line was written, the evaluation of the checkpoint
    before it was still to begin, under way, or over."""
    argv = [sys.executable, "-m", "invoke", "train", "measured"]
    training = subprocess.Popen(argv, cwd=project, stdout=subprocess.DEVNULL)
    found: dict[int, str] = {}
    while training.poll() is None:
        time.sleep(0.02)
        for path in (project / "runs").glob("measured/*/metrics.jsonl"):
            row = newest_row(path)
            if row is None or row["step"] in found:
                continue
            run, step = RunFolder(path.parent), row["step"]
            checkpoint = (step - 1) // interval * interval
            if any(record.step == checkpoint for record in read_evaluations(run)):
                found[step] = "over"
            elif any(run.path.glob(f"evaluations/step-{checkpoint:08d}-*")):
                found[step] = "under way"
            else:
                found[step] = "to begin"
    if training.returncode:
        raise SystemExit(f"train ended with {training.returncode}")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--interval", type=int, default=200, help="steps between them")
    words = parser.parse_args()
    interval, steps = words.interval, words.interval * (words.evaluations + 1)
    with tempfile.TemporaryDirectory(prefix="trainkit-evaluations-") as name:
        project = Path(name)
        (project / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        tables = JOBS.format(folder=name, steps=steps, interval=interval)
        (project / "jobs.toml").write_text(tables)
        with open(project / "docs.jsonl", "w") as file:
            for path in sorted((CHECKOUT / "docs").glob("*.md")):
                file.write(json.dumps({"text": path.read_text()}) + "\n")
        os.environ["PYTHONPATH"] = str(CHECKOUT)
        print(f"load average before: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
        state = states(project, interval)
        (path,) = (project / "runs").glob("measured/*/metrics.jsonl")
        times = {row["step"]: float(row["elapsed_ms"] or 0) for row in read_rows(path)}
        print("| checkpoint | steps beside | ms | steps alone | ms | ratio |")
        print("|---|---|---|---|---|---|")
        ratios = []
        for checkpoint in range(interval, steps, interval):
            after = range(checkpoint + 1, checkpoint + interval + 1)
            beside = [times[step] for step in after if state.get(step) == "under way"]
            alone = [times[step] for step in after if state.get(step) == "over"]
            alone = alone[1 : len(beside) + 1]  # the first was beside it in part
            if min(len(beside), len(alone)) < 10:
                raise SystemExit(f"checkpoint {checkpoint}: not ten steps of each; --interval")
            pair = statistics.median(beside), statistics.median(alone)
            ratios.append(pair[0] / pair[1])
            counts = f"{len(beside)} | {pair[0]:.1f} | {len(alone)} | {pair[1]:.1f}"
            print(f"| {checkpoint} | {counts} | {ratios[-1]:.3f} |")
        print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
