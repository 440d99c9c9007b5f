"""An unmodified GPT-NeoX over other layouts, and started by its own launcher; slow, and only where
tests/engines/real.py finds a tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.real import RealEngine, parameters
from tests.engines.test_real_engines import project_of

pytestmark = pytest.mark.slow

# what changes in jobs.toml, and what is set
WAYS: dict[str, tuple[tuple[str, str], Sequence[str]]] = {
    "deepy.py": (('source = "', 'launch = "deepspeed"\nsource = "'), ()),
    "tensor": (
        ("", ""),
        ("parallelism.tensor_model_parallel_size=2", "training.recompute_granularity=full"),
    ),
    # with stock DeepSpeed its pipeline engine cannot evaluate
    "pipeline": (
        ("pipe_parallel_size = 0", ""),
        (
            "parallelism.pipeline_model_parallel_size=2",
            "training.precision=bf16",
            "training.eval_iters=0",
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("real", parameters("gpt-neox"))
def test_it_trains_to_the_end(tmp_path: Path, real: RealEngine, way: str) -> None:
    project = project_of(tmp_path, real)
    (before, after), sets = WAYS[way]
    jobs = project.path / "jobs.toml"
    if before:
        jobs.write_text(jobs.read_text().replace(before, after, 1))
    project.invoke("train", "tiny", *(word for each in sets for word in ("--set", each)))
    (run,) = project.runs()
    losses = project.losses(run)
    assert sorted(losses) == list(range(1, 13))
    assert losses[12] < losses[1]
    (*_, last) = project.document("checkpoints", "last")["checkpoints"]
    assert last["step"] == 12 and not last["problems"]


@pytest.mark.parametrize("real", parameters("gpt-neox"))
def test_a_longer_run_goes_on_as_it_is_told(tmp_path: Path, real: RealEngine) -> None:
    """Left alone, its cosine would rise again; with a new end of the decay its own check of the
    checkpoint's schedule would end it."""
    project = project_of(tmp_path, real)
    project.invoke("train", "tiny")
    (run,) = project.runs()
    longer = ("--set", "training.train_iters=16")
    said = project.invoke("resume", run.name, *longer, exit=3)
    assert "gpt-neox's cosine rises again after its end" in said.stdout + said.stderr
    project.invoke("resume", run.name, *longer, "--set", "training.lr_decay_iters=16")
    assert sorted(project.losses(run)) == list(range(1, 17))
    rates = [row["learning_rate"] for row in project.metrics(run) if "eval" not in row]
    assert rates[12] > rates[11] and rates[12:] == sorted(rates[12:], reverse=True)
    assert rates[15] == pytest.approx(1e-4)
