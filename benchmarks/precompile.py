"""The first step of a compiled job: cold, warm by `precompile`, and eager, with the ranks of real
runs on this machine: python benchmarks/precompile.py [--model small|demo|gpt2] [--layout
one|tp|pp] [--rounds N].

Each run is `trainkit train` of one step in a folder of its own, the kinds in turn; printed are
medians over the rounds of the time of that step (from the first batch to the end of the update,
compilation included), of the time from the start of rank 0 (before it imports torch) to the end
of that step, so that nothing is hidden in the start, and of the CPU time of the whole run, all
its processes together.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LAYOUTS = {
    "one": (1, "{}"),
    "tp": (4, "{ tensor_model_parallel_size = 2, sequence_parallel = true }"),
    "pp": (2, "{ pipeline_model_parallel_size = 2 }"),
}
MODELS = {
    "small": (
        'family = "llama"\nnum_layers = 4\nhidden_size = 128\nnum_attention_heads = 4\n'
        "seq_length = 64\nvocab_size = 512",
        'micro_batch_size = 1\nprecision = "fp32"',
    ),
    "demo": (
        'family = "gpt"\nnum_layers = 4\nhidden_size = 256\nnum_attention_heads = 4\n'
        "seq_length = 256\nvocab_size = 4096",
        'micro_batch_size = 4\nprecision = "fp32"',
    ),
    "gpt2": (
        'family = "gpt"\nnum_layers = 12\nhidden_size = 768\nnum_attention_heads = 12\n'
        "seq_length = 1024\nvocab_size = 50257",
        'micro_batch_size = 1\nprecision = "bf16"',
    ),
}
JOBS = """
[clusters.here]
ranks_per_node = {ranks}

[models.measured]
{model}

[jobs.measured]
cluster = "here"
model = "measured"
dataset = "mock"
parallelism = {parallelism}

[jobs.measured.training]
{batch}
global_batch_size = {samples}
train_iters = 1
lr = 1e-3
eval_iters = 0
compile = true
"""
KINDS = ("eager", "cold", "warm")


class Measured(NamedTuple):
    """Of one run, in seconds."""

    step: float
    start: float
    cpu: float


def measure(project: Path, kind: str) -> Measured:
    """A new run of one step."""
    cold = project / "cold"
    words = {
        "eager": ("training.compile=false",),
        "cold": (f'env.TORCHINDUCTOR_CACHE_DIR="{cold}"',),
        "warm": ("precompile=true",),
    }[kind]
    run = [sys.executable, "-m", "trainkit", "train", "measured", "--share"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*run, *(part for word in words for part in ("--set", word))],
        cwd=project,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shutil.rmtree(cold, ignore_errors=True)
    newest = max((project / "runs" / "measured").iterdir(), key=lambda folder: folder.name)
    rows = map(json.loads, (newest / "metrics.jsonl").read_text().splitlines())
    step = next(float(row["elapsed_ms"]) for row in rows if "eval" not in row) / 1000
    lines = (newest / "attempts" / "1" / "phases.jsonl").read_text().splitlines()
    phases = [json.loads(line) for line in lines]
    ended = next(phase["time"] for phase in phases if phase["step"] == 1)
    shutil.rmtree(newest)
    return Measured(step, ended - phases[0]["time"], cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of eager,cold,warm")
    given = parser.parse_args()
    ranks, parallelism = LAYOUTS[given.layout]
    model, batch = MODELS[given.model]
    samples = 4 if given.model == "gpt2" else 16
    found: dict[str, list[Measured]] = {kind: [] for kind in given.kinds.split(",")}
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        text = JOBS.format(
            ranks=ranks, parallelism=parallelism, model=model, batch=batch, samples=samples
        )
        (project / "jobs.toml").write_text(text)
        make = [sys.executable, "-m", "trainkit", "precompile", "measured"]
        subprocess.run(make, cwd=project, check=True)
        for _ in range(given.rounds):
            for kind, measured in found.items():
                measured.append(measure(project, kind))
    medians = {
        kind: Measured(*map(statistics.median, zip(*measured, strict=True)))
        for kind, measured in found.items()
    }
    for kind, (step, start, cpu) in medians.items():
        print(
            f"{given.model} {given.layout} {kind}: first step {step:,.3f} s, from rank 0's start"
            f" to its end {start:,.2f} s, CPU of the run {cpu:,.1f} s"
        )
    if {"warm", "eager"} <= set(medians):
        print(f"warm / eager: {medians['warm'].step / medians['eager'].step:.2f}")


if __name__ == "__main__":
    main()
