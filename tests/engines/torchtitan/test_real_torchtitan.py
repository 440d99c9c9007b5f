"""An unmodified torchtitan trains on two ranks, is killed, and goes on with equal losses.

TRAINKIT_TORCHTITAN_SOURCE names its tree, TRAINKIT_TORCHTITAN_PYTHON an interpreter that has torch
2.13 and what it asks for.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests.conftest import Project, wait_for

STAND_IN = Path(__file__).resolve().parents[1] / "stand_ins" / "torchtitan_cpu"
TREE = os.environ.get("TRAINKIT_TORCHTITAN_SOURCE", "")
PYTHON = os.environ.get("TRAINKIT_TORCHTITAN_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TREE and PYTHON),
        reason="no torchtitan: TRAINKIT_TORCHTITAN_SOURCE, TRAINKIT_TORCHTITAN_PYTHON",
    ),
]
JOBS = """
[engines.torchtitan]
source = "{tree}"
python = "{python}"

[clusters.here]
ranks_per_node = 2
node_folder = "{folder}/node"
env = {{ PYTHONPATH = "{stand_in}", TORCHDYNAMO_DISABLE = "1", OMP_NUM_THREADS = "1" }}

[models.tiny]
family = "llama"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 128
seq_length = 64
vocab_size = 512

[jobs.tiny]
engine = "torchtitan"
cluster = "here"
model = "tiny"
dataset = "mock"
parallelism.zero_stage = 2
retry.infra = 2

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 16
lr = 1e-3
min_lr = 1e-4
lr_warmup_iters = 2
log_interval = 1
eval_interval = 8
eval_iters = 1
save_interval = 5
precision = "fp32"

# the default is of a torch newer than 2.13
[jobs.tiny.engine_args]
"parallelism.spmd_backend" = "partial_dtensor"
"""
LAYOUTS = {
    "zero 2": [],
    "zero 3": ["parallelism.zero_stage=3"],
    "copies": ["parallelism.zero_stage=0"],
    "copies of shards": [
        "cluster.ranks_per_node=4",
        "parallelism.data_parallel_replicate_size=2",
        "training.micro_batch_size=1",
    ],
    "tensor": ["parallelism.tensor_model_parallel_size=2"],
    "sequence": [
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.sequence_parallel=true",
    ],
    "context": ["parallelism.context_parallel_size=2", "model.seq_length=512"],
    "pipeline": ["parallelism.pipeline_model_parallel_size=2"],
    "qwen3": ['model.family="qwen3"', 'model.qk_norm="head"'],
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    places = {"tree": TREE, "python": PYTHON, "folder": tmp_path, "stand_in": STAND_IN}
    (tmp_path / "jobs.toml").write_text(JOBS.format(**places))
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(tmp_path)


def said(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "grad_norm" in row]
    return {row["step"]: (row["lm_loss"], row["grad_norm"]) for row in rows}


def ranks(run: Path) -> list[int]:
    """The processes of torchtitan itself, in order of their ids."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if b"torchtitan.inside.main" in words and run.name.encode() in words:
            found.append(int(place.name))
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_rank_is_made_good(project: Project, layout: str) -> None:
    sets = [f"--set={each}" for each in LAYOUTS[layout]]
    project.invoke("train", "tiny", *sets)
    (whole,) = project.runs()
    assert sorted(said(whole)) == list(range(1, 17))
    assert project.document("status", "last")["state"] == "succeeded"
    listed = project.document("checkpoints", "last")["checkpoints"]
    assert listed[-1]["step"] == 16 and not any(each["problems"] for each in listed)
    process = project.start("train", "tiny", *sets)
    stop = random.randint(6, 14)

    def there() -> Path | None:
        runs = [run for run in project.runs() if run != whole]
        ready = runs and (runs[0] / "metrics.jsonl").exists()
        return runs[0] if ready and max(said(runs[0]), default=0) >= stop else None

    run = wait_for(there, f"step {stop}")
    os.kill(random.choice(ranks(run)), signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert said(run) == said(whole)
    assert project.document("status", run.name)["attempt"] == 2


def test_an_end_before_the_last_step_is_a_failure(project: Project) -> None:
    """Told to save its initial weights alone, torchtitan ends with 0."""
    seed = 'engine_args={"checkpoint.create_seed_checkpoint"=true}'
    sets = ("--set=cluster.ranks_per_node=1", f"--set={seed}", "--set=retry.infra=0")
    project.invoke("train", "tiny", *sets, exit=9)
    assert project.document("status", "last")["state"] == "failed"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_computes_what_native_computes(project: Project, family: str, precision: str) -> None:
    """From the same weights, on the same samples: `diff-engines`."""
    with open(project.path / "jobs.toml", "a") as file:
        file.write('[jobs.ours]\nextends = "tiny"\nengine = "native"\nengine_args = {}\n')
    sets = [f'--set=model.family="{family}"', f'--set=training.precision="{precision}"']
    asked = ("diff-engines", "tiny", "--engines=ours,torchtitan", "--steps=5", *sets)
    found = project.document(*asked, f"--tolerance={1e-5 if precision == 'fp32' else 1e-2}")
    worst = max(each["relative"] for each in found["steps"])
    moved = max(each["parts"] for each in found["tensors"])
    print(f"{family} {precision}: numbers {worst:.1e} apart, tensors {moved:.1e} of their way")
    assert len(found["steps"]) == 10
