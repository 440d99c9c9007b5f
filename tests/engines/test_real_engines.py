"""Unmodified trees of GPT-NeoX and Megatron-LM train, are killed, and go on, under our agents.

They are slow (each rank imports torch and the engine), and run where tests/engines/real.py finds
trees.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, alive, wait_for
from tests.engines.real import RealEngine, parameters
from tests.shared import golden

pytestmark = pytest.mark.slow

JOBS = """
[clusters.here]
ranks_per_node = 2
node_folder = "{folder}/node"

[clusters.here.env]
{environment}

[engines.{engine}]
source = "{tree}"
python = "{python}"

[tokenizers.gpt2]
type = "gpt2"
vocab_size = 50257
vocab_file = "vocab.json"
merge_file = "merges.txt"

[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "gpt2"
split = "80,10,10"

[models.tiny]
family = "{family}"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64
attention_dropout = 0.0
hidden_dropout = 0.0
{model}

[jobs.tiny]
engine = "{engine}"
cluster = "here"
model = "tiny"
dataset = "lines"
{job}

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 12
lr = 1e-3
min_lr = 1e-4
lr_warmup_iters = 2
eval_iters = {eval_iters}
eval_interval = 6
save_interval = 4
log_interval = 1
precision = "{precision}"

[jobs.tiny.engine_args]
{engine_args}
"""
# what a machine without a GPU, Apex and Transformer Engine leaves of each engine
WITHOUT_GPU: dict[str, dict[str, str]] = {
    "megatron-lm": {
        "family": "gpt",
        "model": "",
        # 2021 has no distributed optimizer, and that of 0.12 needs Transformer Engine
        "job": "parallelism = { zero_stage = 0 }",
        "precision": "fp32",
        "eval_iters": "1",
        "engine_args": "",
    },
    "gpt-neox": {
        "family": "gpt-neox",
        "model": "",
        "job": "",
        "precision": "fp32",
        "eval_iters": "1",
        # with stock DeepSpeed its pipeline engine cannot evaluate
        "engine_args": "pipe_parallel_size = 0",
    },
}
ENGINES = [*parameters("megatron-lm"), *parameters("gpt-neox")]


def project_of(tmp_path: Path, real: RealEngine) -> Project:
    """A project whose job runs a real engine on CPUs."""
    data = golden()
    if data is None or not (data.parent / "gpt2-vocab.json").is_file():
        pytest.skip("no GPT-2 vocabulary: see tests/shared.py")
    shutil.copy(data.parent / "gpt2-vocab.json", tmp_path / "vocab.json")
    shutil.copy(data.parent / "gpt2-merges.txt", tmp_path / "merges.txt")
    (tmp_path / "corpus").mkdir()
    text = (data.parent / "tinyshakespeare.txt").read_text()[:200_000]
    speeches = [json.dumps({"text": speech}) for speech in text.split("\n\n")]
    (tmp_path / "corpus" / "plays.jsonl").write_text("\n".join(speeches) + "\n")
    environment = "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in real.environment.items()
    )
    (tmp_path / "jobs.toml").write_text(
        JOBS.format(
            folder=tmp_path,
            environment=environment,
            engine=real.engine,
            tree=real.tree,
            python=real.python,
            **WITHOUT_GPU[real.engine],
        )
    )
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(tmp_path)


def losses_of(project: Project, run: Path) -> dict[int, float]:
    return project.losses(run)


@pytest.mark.parametrize("real", ENGINES)
def test_it_trains_to_the_end_and_is_recorded(tmp_path: Path, real: RealEngine) -> None:
    project = project_of(tmp_path, real)
    project.invoke("train", "tiny")
    (run,) = project.runs()
    losses = losses_of(project, run)
    assert sorted(losses) == list(range(1, 13))
    assert losses[12] < losses[1]
    rows = [row for row in project.metrics(run) if "eval" not in row]
    assert all(row["elapsed_ms"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert all(row["learning_rate"] > 0 for row in rows[1:])
    status = project.document("status", "last")
    assert status["state"] == "succeeded"
    listed = project.document("checkpoints", "last")["checkpoints"]
    assert listed[-1]["step"] == 12
    assert not any(each["problems"] for each in listed)


@pytest.mark.parametrize("real", ENGINES)
def test_killed_at_a_random_moment_it_leaves_nothing_and_goes_on_alike(
    tmp_path: Path, real: RealEngine
) -> None:
    project = project_of(tmp_path, real)
    project.invoke("train", "tiny")
    (whole,) = project.runs()
    reference = losses_of(project, whole)
    process = project.start("train", "tiny")
    run = wait_for(lambda: next((r for r in project.runs() if r != whole), None), "the run")
    moment = random.Random(os.getpid()).randint(5, 10)
    wait_for(
        lambda: (
            process.poll() is not None
            or ((run / "metrics.jsonl").exists() and len(project.metrics(run)) >= moment)
        ),
        "some steps",
    )
    victims = engine_processes(run)
    assert victims, "the engine has ended before it could be killed"
    os.kill(victims[0], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 10, (out, err)
    assert not engine_processes(run)
    project.invoke("resume", run.name)
    losses = losses_of(project, run)
    assert sorted(losses) == list(range(1, 13))
    assert losses == pytest.approx(reference, rel=1e-5)


def engine_processes(run: Path) -> list[int]:
    """Processes of a run's engine: by the mark in their environment, not ours by their command."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        ours = f"TRAINKIT_RUN={run.name}/".encode() in environment
        engines = b"pretrain_gpt.py" in command or b"train.py" in command
        if ours and engines and alive(int(folder.name)):
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("real", ENGINES)
def test_asked_to_stop_it_is_stopped_and_goes_on(tmp_path: Path, real: RealEngine) -> None:
    project = project_of(tmp_path, real)
    process = project.start("train", "tiny")
    run = wait_for(lambda: next(iter(project.runs()), None), "the run")
    wait_for(
        lambda: (
            process.poll() is not None
            or ((run / "metrics.jsonl").exists() and len(project.metrics(run)) >= 5)
        ),
        "some steps",
    )
    project.invoke("cancel", run.name, exit=15)
    process.communicate()
    assert not engine_processes(run)
    project.invoke("resume", run.name)
    assert sorted(losses_of(project, run)) == list(range(1, 13))


@pytest.mark.parametrize("real", ENGINES)
def test_a_run_that_its_engine_ends_early_has_failed(tmp_path: Path, real: RealEngine) -> None:
    """--exit-interval and the like: exit code 0, and training is not done."""
    project = project_of(tmp_path, real)
    option = "exit-interval" if real.engine == "megatron-lm" else "exit_interval"
    said = project.invoke("train", "tiny", "--set", f"engine_args.{option}=5", exit=9)
    assert "training is not done" in said.stderr
    why: dict[str, Any] = project.document("why", "last", exit=0)
    assert why["root_cause"]["type"] == "EngineEndedEarly"
