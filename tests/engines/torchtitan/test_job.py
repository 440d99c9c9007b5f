"""A job as torchtitan is given it, and what it is not given: without a tree that could run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.engines.torchtitan.engine import Torchtitan
from trainkit.runs.folder import RunFolder

JOBS = """
[engines.torchtitan]
source = "{tree}"
python = "python-of-torchtitan"

[clusters.here]
ranks_per_node = 4

[models.tiny]
family = "qwen3"
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
parallelism = {{ zero_stage = 3, tensor_model_parallel_size = 2 }}

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 10
lr = 1e-3
min_lr = 1e-4
save_interval = 4
eval_interval = 5
eval_iters = 3
precision = "bf16"

[jobs.tiny.engine_args]
"training.gc_freq" = 10
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    tree = tmp_path / "torchtitan"
    for name in ("torchtitan/train.py", "torchtitan/trainer.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    (tree / "assets").mkdir()
    (tree / "assets" / "version.txt").write_text("0.3.0\n")
    (tmp_path / "jobs.toml").write_text(JOBS.format(tree=tree))
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(tmp_path)


def test_its_document_says_the_job(project: Project) -> None:
    shown = json.loads(project.invoke("train", "tiny", "--dry-run", "--json").stdout)
    (command,) = (value for key, value in shown.items() if key == "command")
    assert command["engine_argv"][-2:] == ["--training.gc_freq", "10"]
    said = json.loads(shown["files"]["launch/torchtitan-1.json"])
    assert said["parallelism"]["tensor_parallel_degree"] == 2
    assert said["parallelism"]["data_parallel_shard_degree"] == 2
    assert said["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert said["training"]["mixed_precision_param"] == "bfloat16"
    assert said["training"]["local_batch_size"] == 2
    evaluation = {"enable": True, "freq": 5, "steps": 6}  # of two local batches a global one
    assert said["validation"] == evaluation
    assert said["checkpoint"]["load_step"] == -1
    assert said["model"]["family"] == "qwen3" and said["model"]["theta"] == 1000000.0
    assert said["train"]["mock"] == {"seed": 1234, "vocab_size": 512}


@pytest.mark.parametrize(
    ("change", "said", "code"),
    [
        ("parallelism.zero_stage=1", "FSDP shards gradients too (2), or all (3)", 4),
        ('training.precision="fp16"', "training.precision = 'fp16' has no counterpart", 3),
        ("training.z_loss=1e-4", "training.z_loss = 0.0001 has no counterpart", 3),
        ('engine_args={"training.gcfreq"=1}', "has no option 'training.gcfreq'", 3),
        ('model.family="olmo2"', "this version trains llama and qwen3", 3),
        ('model.qk_norm="none"', "torchtitan's qwen3 has 'head'", 3),
        ("profile={start=3,stop=4}", "profile = {...} has no counterpart", 3),
        ("model.init_method_std=0.01", "it begins by a rule of its own", 3),
        ("checkpoint.keep_last=1", "keeps two at least", 3),
        ('model.rope_scaling={type="llama3",factor=8}', "torchtitan's qwen3 has none", 3),
        ("parallelism.context_parallel_size=2", "must be a multiple of 512", 4),
        ("training.reset_position_ids=true", "has both or none", 3),
    ],
)
def test_what_it_cannot_is_refused(project: Project, change: str, said: str, code: int) -> None:
    done = project.invoke("train", "tiny", "--set", change, "--dry-run", exit=code)
    assert said in " ".join(f"{done.stdout} {done.stderr}".split())


def test_what_cannot_be_loaded_is_put_aside_and_kept(tmp_path: Path) -> None:
    """torchtitan loads the newest folder of its name, and saves over what is in it."""
    run = RunFolder(tmp_path / "run")
    for name in ("step-4", "damaged-4-1"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "part").write_text(name)
    Torchtitan().ready_folder(run)
    found = {path.name: (path / "part").read_text() for path in run.checkpoints.iterdir()}
    assert found == {"damaged-4-1": "damaged-4-1", "damaged-4-2": "step-4"}


def test_another_version_is_refused(project: Project, tmp_path: Path) -> None:
    (tmp_path / "torchtitan" / "assets" / "version.txt").write_text("0.4.0\n")
    done = project.invoke("train", "tiny", "--dry-run", exit=3)
    assert "torchtitan 0.4.0: this version of trainkit makes configurations of 0.3.x" in done.stderr


def test_a_tree_that_is_none_is_named(project: Project, tmp_path: Path) -> None:
    (tmp_path / "torchtitan" / "torchtitan" / "trainer.py").unlink()
    done = project.invoke("train", "tiny", "--dry-run", exit=3)
    assert "is not a tree of torchtitan: it has no torchtitan/trainer.py" in done.stderr
