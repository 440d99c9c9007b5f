"""The first step of a compiled job: cold, warm by `precompile`, and eager, with the ranks of real
runs on this machine: python benchmarks/precompile.py [--layout tp|pp].

Each run is a process of `trainkit train` in a folder of its own; what is printed is the time of its
first step, compilation included, from metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LAYOUTS = {
    "tp": (4, "{ tensor_model_parallel_size = 2, sequence_parallel = true }"),
    "pp": (2, "{ pipeline_model_parallel_size = 2 }"),
}
JOBS = """
[clusters.here]
ranks_per_node = {ranks}

[models.small]
family = "llama"
num_layers = 4
hidden_size = 128
num_attention_heads = 4
seq_length = 64
vocab_size = 512

[jobs.small]
cluster = "here"
model = "small"
dataset = "mock"
parallelism = {parallelism}
training = {{ global_batch_size = 8, train_iters = 2, lr = 1e-3, eval_iters = 0, compile = true }}
"""


def first_step(project: Path, *words: str) -> float:
    """Milliseconds of the first step of a new run."""
    run = [sys.executable, "-m", "trainkit", "train", "small", "--share", *words]
    subprocess.run(run, cwd=project, check=True, stdout=subprocess.DEVNULL)
    newest = max((project / "runs" / "small").iterdir(), key=lambda folder: folder.name)
    rows = map(json.loads, (newest / "metrics.jsonl").read_text().splitlines())
    return next(float(row["elapsed_ms"]) for row in rows if "eval" not in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    layout = parser.parse_args().layout
    ranks, parallelism = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        (project / "jobs.toml").write_text(JOBS.format(ranks=ranks, parallelism=parallelism))
        cold = project / "cold"
        eager = first_step(project, "--set", "training.compile=false")
        print(f"{layout}: eager {eager:,.0f} ms", flush=True)
        variable = f'env.TORCHINDUCTOR_CACHE_DIR="{cold}"'
        print(f"{layout}: cold {first_step(project, '--set', variable):,.0f} ms", flush=True)
        shutil.rmtree(cold)
        subprocess.run(
            [sys.executable, "-m", "trainkit", "precompile", "small"], cwd=project, check=True
        )
        warm = first_step(project, "--set", "precompile=true")
        print(f"{layout}: warm {warm:,.0f} ms, {warm / eager:.2f} x eager", flush=True)


if __name__ == "__main__":
    main()
