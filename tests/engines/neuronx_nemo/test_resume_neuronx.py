"""A run of neuronx-nemo goes on from its newest whole checkpoint, by the word of its scripts."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.engines.neuronx_nemo.test_neuronx_argv import jobs, older, resolved
from trainkit.base.errors import ConfigError
from trainkit.engines.foreign import spec_name
from trainkit.engines.hydra_words import read_override
from trainkit.engines.neuronx_nemo.engine import NeuronxNemo
from trainkit.engines.neuronx_nemo.words import checkpoint_word
from trainkit.engines.rank.neuronx_nemo import grid, newest_whole, tracked_step
from trainkit.jobs.load import Jobs
from trainkit.runs.folder import RunFolder

__all__ = ["jobs"]


def save(folder: Path, name: str, ranks: list[str]) -> None:
    """A checkpoint with a file a rank, and its tensors beside it (save_xser)."""
    for rank in ranks:
        path = folder / rank / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", b"x" * 64)
        tensors = path.with_name(f"{path.name}.tensors")
        tensors.mkdir()
        (tensors / "tensor_0.pt").write_bytes(b"x")


RANKS = [f"tp_rank_{t:02d}_pp_rank_{p:03d}" for t in range(2) for p in range(2)]
NAME = "megatron_gpt--step={}-consumed_samples={}.0"


def argv_of(jobs: Jobs, run: RunFolder, *changes: str) -> list[str]:
    degrees = [f"parallelism.{each}_model_parallel_size=2" for each in ("tensor", "pipeline")]
    command = NeuronxNemo().command(resolved(jobs, "23b", *degrees, *changes), run, 2)
    spec: dict[str, Any] = json.loads(command.files[spec_name(2)])
    argv: list[str] = spec["argv"]
    return argv


def test_the_word_of_the_published_scripts() -> None:
    """The comment below test.sh, as bash hands it on."""
    path = "/efs/checkpoint/megatron_gpt--step=1085-consumed_samples=69632.0-last.ckpt"
    word = checkpoint_word(path)
    assert word == (r"/efs/checkpoint/megatron_gpt--step\=1085-consumed_samples\=69632.0-last.ckpt")
    assert read_override(f"model.resume_from_checkpoint={word}").value == path
    odd = "/my folder/step=1,2.ckpt"
    assert read_override(f"a={checkpoint_word(odd)}").value == odd


def test_it_goes_on_from_the_newest_whole_one(jobs: Jobs, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "neuron" / "run-1")
    assert not any("resume_from_checkpoint" in word for word in argv_of(jobs, run))
    save(run.checkpoints, NAME.format(100, 3200), RANKS)
    save(run.checkpoints, f"{NAME.format(200, 6400)}-last", RANKS)
    save(run.checkpoints, NAME.format(300, 9600), RANKS[:3])  # one rank never wrote its file
    assert tracked_step(run.checkpoints) == 200
    newest = run.checkpoints / f"{NAME.format(200, 6400)}-last.ckpt"
    assert newest_whole(run.checkpoints) == newest
    assert grid(run.checkpoints) == (2, 2)
    last = argv_of(jobs, run)[-1]
    assert last == f"model.resume_from_checkpoint={checkpoint_word(str(newest))}"
    assert r"--step\=200-consumed_samples\=6400.0-last.ckpt" in last
    assert read_override(last).value == str(newest)


def test_2_13_1_reads_tensors_where_it_wrote_them(jobs: Jobs, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "neuron" / "run-1")
    save(run.checkpoints, NAME.format(100, 3200), RANKS)
    writes = "engine_args.exp_manager.create_checkpoint_callback=true"
    xser = (
        'engine_args={ "+model.save_xser" = true, "exp_manager.create_checkpoint_callback" = true }'
    )
    for change, there in ((writes, False), (xser, True)):
        job = older(jobs, "23b", change)
        command = NeuronxNemo().command(job, run, 2)
        argv = json.loads(command.files[spec_name(2)])["argv"]
        assert ("+model.load_xser=True" in argv) == there
        assert argv[-1].startswith("model.resume_from_checkpoint=")


def test_other_degrees_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "neuron" / "run-1")
    engine = NeuronxNemo()
    job = resolved(jobs, "23b")
    assert engine.resume_problems(job, run) == []
    save(run.checkpoints, NAME.format(100, 3200), RANKS)
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size 2, and the job has"):
        engine.before_attempt(job, run)
    flat = RunFolder(tmp_path / "runs" / "neuron" / "run-2")
    save(flat.checkpoints, NAME.format(100, 3200), [f"mp_rank_{t:02d}" for t in range(8)])
    assert engine.resume_problems(resolved(jobs, "6-7b"), flat) == []
    assert len(engine.resume_problems(job, flat)) == 1


def test_checkpoints_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "neuron" / "run-1")
    save(run.checkpoints, NAME.format(100, 3200), RANKS)
    save(run.checkpoints, NAME.format(200, 6400), RANKS[1:])
    whole, damaged = NeuronxNemo().checkpoints(run, hashes=False)
    assert (whole.step, whole.problems) == (100, [])
    assert damaged.step == 200 and damaged.problems
