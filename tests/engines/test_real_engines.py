"""Unmodified trees of GPT-NeoX, Megatron-LM and Megatron-Bridge train, are killed, and go on, under
our agents.

They are slow (each rank imports torch and the engine), and run where tests/engines/real.py finds
trees.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Project, alive, wait_for
from tests.engines.convert.real_logits import TOKENS_BS, real_logits
from tests.engines.convert.support import layout as file_layout
from tests.engines.real import RealEngine, environment_toml, parameters, write_job
from tests.train.hf_support import equal
from trainkit.jobs.schema import Model

pytestmark = pytest.mark.slow

CLUSTER = """
[clusters.here]
ranks_per_node = 2
node_folder = "{folder}/node"
env = {environment}
"""
ENGINES = [*parameters("megatron-lm"), *parameters("megatron-bridge"), *parameters("gpt-neox")]


def project_of(tmp_path: Path, real: RealEngine) -> Project:
    """A project whose job runs a real engine on CPUs."""
    tables = write_job(tmp_path, real, "here", 1)
    cluster = CLUSTER.format(folder=tmp_path, environment=environment_toml(real))
    (tmp_path / "jobs.toml").write_text(cluster + tables)
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(tmp_path)


def losses_of(project: Project, run: Path) -> dict[int, float]:
    return project.losses(run)


@pytest.mark.parametrize("real", ENGINES)
def test_it_trains_to_the_end_and_is_recorded(tmp_path: Path, real: RealEngine) -> None:
    project = project_of(tmp_path, real)
    said = project.invoke("train", "tiny").stdout
    assert "convert" in said and "generate" not in said and "has no checkpoint" not in said
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


def killed_after(project: Project, lines: int, *sets: str) -> Path:
    """A run of which one process was killed when it had printed so many lines."""
    former = project.runs()
    process = project.start("train", "tiny", *sets)

    def begun() -> list[Path]:
        return [
            run for run in project.runs() if run not in former and (run / "metrics.jsonl").exists()
        ]

    wait_for(
        lambda: (
            process.poll() is not None or any(len(project.metrics(run)) >= lines for run in begun())
        ),
        "some steps",
    )
    assert process.poll() is None, ("it has ended before it was killed", process.communicate())
    (run,) = begun()
    victims = engine_processes(run)
    os.kill(victims[0], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 10, (out, err)
    assert not engine_processes(run)
    return run


@pytest.mark.parametrize("real", ENGINES)
def test_killed_at_a_random_moment_it_leaves_nothing_and_goes_on_alike(
    tmp_path: Path, real: RealEngine
) -> None:
    project = project_of(tmp_path, real)
    project.invoke("train", "tiny")
    (whole,) = project.runs()
    reference = losses_of(project, whole)
    run = killed_after(project, random.Random(os.getpid()).randint(5, 10))
    project.invoke("resume", run.name)
    losses = losses_of(project, run)
    assert sorted(losses) == list(range(1, 13))
    assert_alike(losses, reference)


# every kind of layout that a plan can call feasible for these engines, on two ranks
TENSOR = "parallelism.tensor_model_parallel_size=2"
PIPELINE = "parallelism.pipeline_model_parallel_size=2"
LAYOUTS = {
    "zero-0": ["parallelism.zero_stage=0"],
    "zero-1": ["parallelism.zero_stage=1"],
    "zero-1-bf16": ["parallelism.zero_stage=1", "training.precision=bf16"],
    "zero-2": ["parallelism.zero_stage=2", "training.precision=bf16"],
    "zero-3": ["parallelism.zero_stage=3", "training.precision=bf16"],
    "tensor": [TENSOR],
    "sequence": [TENSOR, "parallelism.sequence_parallel=true"],
    # with stock DeepSpeed its pipeline engine cannot evaluate
    "pipeline": [PIPELINE, "training.precision=bf16", "training.eval_iters=0"],
    "interleaved": [
        PIPELINE,
        "parallelism.virtual_pipeline_model_parallel_size=2",
        "model.num_layers=4",
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("real", ENGINES)
def test_a_layout_that_is_called_feasible_goes_on_alike(
    tmp_path: Path, real: RealEngine, layout: str
) -> None:
    """What it trains after a kill is what it had trained before; else the plan objects, and says
    what to do."""
    project = project_of(tmp_path, real)
    jobs = project.path / "jobs.toml"
    if "pipeline" in layout:
        jobs.write_text(jobs.read_text().replace("pipe_parallel_size = 0", ""))
    given = [*LAYOUTS[layout], "training.eval_interval=100", "training.train_iters=16"]
    sets = [word for each in given for word in ("--set", each)]
    planned = project.start("plan", "tiny", "--json", *sets)
    out, err = planned.communicate()
    if planned.returncode != 0:
        assert planned.returncode == 4, err
        assert json.loads(out)["objections"]
        return
    run = killed_after(project, 7, *sets)
    before = losses_of(project, run)
    project.invoke("resume", run.name)
    losses = losses_of(project, run)
    assert sorted(losses) == list(range(1, 17))
    assert_alike({step: losses[step] for step in before}, before)


def assert_alike(losses: dict[int, float], reference: dict[int, float]) -> None:
    """The losses of a run that went on are those of one that was never stopped. Megatron-LM since
    0.16 prints its first iteration without taking it out of the next line, which is then the mean
    of both."""
    other = [step for step in losses if losses[step] != pytest.approx(reference[step], rel=1e-5)]
    assert len(other) <= 1
    for step in other:
        mean = (reference[step - 1] + reference[step]) / 2
        assert losses[step] == pytest.approx(mean, rel=1e-5)


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
        scripts = (b"pretrain_gpt.py", b"run_recipe.py", b"train.py")
        engines = any(script in command for script in scripts)
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
    options = {"megatron-lm": "exit-interval", "megatron-bridge": "train.exit_interval"}
    option = options.get(real.engine, "exit_interval")
    said = project.invoke("train", "tiny", "--set", f'engine_args."{option}"=5', exit=9)
    assert "training is not done" in said.stdout + said.stderr
    why: dict[str, Any] = project.document("why", "last", exit=0)
    assert why["root_cause"]["type"] == "EngineEndedEarly"


@pytest.mark.parametrize("real", parameters("megatron-lm"))
@torch.no_grad()
def test_a_trained_qwen3_is_transformers_own(tmp_path: Path, real: RealEngine) -> None:
    """Trained on two tensor-parallel ranks and converted to Hugging Face, where it computes what
    the engine does."""
    transformers = pytest.importorskip("transformers")
    project = project_of(tmp_path, real)
    shape: dict[str, Any] = {"family": "qwen3", "kv_channels": 32, "num_query_groups": 2}
    sets = [f"model.{key}={value}" for key, value in shape.items()]
    sets += [TENSOR, "training.train_iters=4", "training.eval_iters=0"]
    project.invoke("train", "tiny", *(word for each in sets for word in ("--set", each)))
    (run,) = project.runs()
    project.invoke("convert", run.name, "--to", "hf", "--out", "hf")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    fixed: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    model = Model(**fixed, **shape, seq_length=64)
    cut = file_layout(tensor=2, divisor=128)
    rows = theirs.config.vocab_size
    (tmp_path / "scratch").mkdir()
    found = real_logits(real, model, cut, run / "checkpoints", tmp_path / "scratch", rows)
    logits = theirs(TOKENS_BS).logits
    print(f"{real.tree.name}: {(found - logits).abs().max():.2e} of {logits.std():.2f}")
    assert (theirs.model.layers[0].self_attn.q_norm.weight != 1).any()
    equal(found, logits)
