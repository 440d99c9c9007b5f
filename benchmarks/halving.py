"""Claim: halving finds the best of 16 settings of the demo at no more than 40 % of the cost of
training all 16.

    python benchmarks/halving.py [--root DIR] [--svg FILE]

Four learning rates at each of four widths of the demo's model (2 layers, 64 steps of 4 sequences of
128 tokens, one rank), once all to their end and once with rungs at steps 12 and 48, from each of
which one of four goes on. Cost is counted in optimizer steps, and measured as the time of all
steps, by the clock of each run (metrics.jsonl), without the starts of its processes. What is
interrupted goes on by the same command with the same --root; in it `all` lies in a folder of its
own, with its own data, so that both can be begun by hand beside each other. The loss of the best
must be the same bits in both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.checkout.machine import describe, machine
from trainkit.runs.folder import RunFolder
from trainkit.runs.summary import summarize_run

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.40
JOBS = """
[jobs.all]
extends = "demo"
sweep.grid.model.hidden_size = [64, 128, 192, 256]
sweep.grid.training.lr = [5e-4, 2e-3, 8e-3, 3.2e-2]
[jobs.all.training]
global_batch_size = 4
train_iters = 64
lr_warmup_iters = 8
eval_interval = 64
save_interval = 64

[jobs.halved]
extends = "all"
sweep.halving = { first_rung = 12, factor = 4 }
"""
# the demo's model, smaller
MODEL = "model.num_layers=2", "model.seq_length=128", "cluster.ranks_per_node=1"


def sweep(root: Path, job: str, *words: str) -> Mapping[str, Any]:
    """Go on with a sweep in a folder of its own to its end: the document sweep/1."""
    root.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "jobs", root / "jobs", dirs_exist_ok=True)
    (root / "jobs.toml").write_text((ROOT / "jobs.toml").read_text() + JOBS)
    (root / "jobs.local.toml").write_text(f'[clusters.here]\nnode_folder = "{root}/node"\n')
    sets = [word for each in MODEL for word in ("--set", each)]
    argv = [sys.executable, "-P", "-m", "trainkit", "--search-root", str(root), "sweep", job]
    done = subprocess.run(
        [*argv, *sets, *words, "--json"], cwd=root, check=True, stdout=subprocess.PIPE
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def seconds_of(found: Mapping[str, Any]) -> float:
    """The time of all steps of all runs of a sweep."""
    root = Path(found["folder"]).parents[2]
    runs = [RunFolder(root / "runs" / found["job"] / m["run"]) for m in found["members"]]
    return sum(summarize_run(run).training_seconds for run in runs)


def best_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    ended = [member for member in found["members"] if member["state"] == "succeeded"]
    return min(ended, key=lambda member: float(member["validation_loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--svg", type=Path, help="also draw the halved sweep")
    options = parser.parse_args()
    root = (options.root or Path(tempfile.mkdtemp(prefix="halving-"))).absolute()
    halved = sweep(root, "halved", *(["--svg", str(options.svg.absolute())] if options.svg else []))
    whole = sweep(root / "all", "all")
    print(f"{describe(machine())}\n")
    print(
        "| width | rate | all 16 | halved: loss | state | after step |\n|---|---|---|---|---|---|"
    )
    for one, other in zip(whole["members"], halved["members"], strict=True):
        width, rate = one["values"].values()
        losses = [f"{each['validation_loss']:.4f}" for each in (one, other)]
        print(
            f"| {width} | {rate:g} | {losses[0]} | {losses[1]} | {other['state']}"
            f" | {other['step']} |"
        )
    steps = [sum(member["step"] for member in found["members"]) for found in (whole, halved)]
    times = [seconds_of(found) for found in (whole, halved)]
    print(f"\nsteps: {steps[1]} of {steps[0]}, {steps[1] / steps[0]:.1%}")
    print(f"time of all steps: {times[1]:.0f} of {times[0]:.0f} s, {times[1] / times[0]:.1%}")
    one, other = best_of(whole), best_of(halved)
    for name, best in (("all 16", one), ("halved", other)):
        print(f"best of {name}: {best['values']}, validation loss {best['validation_loss']!r}")
    same = one["values"] == other["values"]
    if not same or one["validation_loss"] != other["validation_loss"]:
        raise SystemExit("halving has not found the best")
    if max(steps[1] / steps[0], times[1] / times[0]) > GOAL:
        raise SystemExit(f"it costs more than {GOAL:.0%}")


if __name__ == "__main__":
    main()
