"""From which checkpoint Megatron-LM goes on, and when it may."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest

from tests.engines.megatron_lm.test_argv import commanded, tiny
from trainkit.base.errors import ConfigError
from trainkit.engines.megatron_lm.engine import MegatronLm
from trainkit.engines.options import load_table
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

TABLE = load_table("megatron-lm", "core-0.12.0")


def run_of(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs/mock/20261122-120000-abcd")
    run.checkpoints.mkdir(parents=True)
    return run


def saved(run: RunFolder, step: int, tensor: int = 1, stages: int = 1) -> None:
    """A checkpoint of ckpt-format torch, as far as it can be judged without torch."""
    for rank in range(tensor):
        for stage in range(stages):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            folder = run.checkpoints / f"iter_{step:07d}" / name
            folder.mkdir(parents=True)
            with zipfile.ZipFile(folder / "model_optim_rng.pt", "w") as archive:
                archive.writestr("archive/data.pkl", b"x" * 100)
    (run.checkpoints / MegatronLm.tracker).write_text(str(step))


def saved_with_experts(run: RunFolder, tensor: int, experts: int, split: int) -> None:
    """The same where a name's second number is of experts, as the arguments in it say. An expert
    that is split otherwise than the rest has ranks of other experts in one tensor-parallel group.
    """
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": experts,
        "expert_tensor_parallel_size": split,
    }
    for rank in range(max(tensor, experts) if split < tensor else tensor * experts):
        name = f"mp_rank_{rank % tensor:02d}_{rank // split % experts:03d}"
        folder = run.checkpoints / "iter_0000004" / name
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "model_optim_rng.pt", "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(sizes, protocol=2))
    (run.checkpoints / MegatronLm.tracker).write_text("4")


def job_in(tmp_path: Path, *sets: str) -> Job:
    return tiny(f"cluster.root={tmp_path}", f"engine_source.source={tmp_path}/tree", *sets)


def loads(job: Job, run: RunFolder) -> bool:
    options, _ = commanded(job, run)
    assert ("--override-opt_param-scheduler" in options) == ("--load" in options)
    return "--load" in options


def test_an_empty_folder_is_never_loaded(tmp_path: Path) -> None:
    """engines.md, false success 1: one warning, random weights, exit code 0."""
    run = run_of(tmp_path)
    job = job_in(tmp_path)
    MegatronLm().before_attempt(job, run)
    assert not loads(job, run)
    (run.checkpoints / MegatronLm.tracker).write_text("7")  # a folder that is not there
    MegatronLm().before_attempt(job, run)
    assert not (run.checkpoints / MegatronLm.tracker).exists()
    assert not loads(job, run)


def test_it_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    job = job_in(tmp_path)
    saved(run, 4)
    saved(run, 8)
    MegatronLm().before_attempt(job, run)
    assert (run.checkpoints / MegatronLm.tracker).read_text() == "8"
    assert loads(job, run)
    damaged = run.checkpoints / "iter_0000008/mp_rank_00/model_optim_rng.pt"
    damaged.write_bytes(b"")
    assert not loads(job, run)
    MegatronLm().before_attempt(job, run)
    assert (run.checkpoints / MegatronLm.tracker).read_text() == "4"
    assert loads(job, run)
    listed = MegatronLm().checkpoints(run, hashes=False)
    assert [each.step for each in listed if not each.problems] == [4]


def test_rows_after_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    saved(run, 4)
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    MegatronLm().before_attempt(job_in(tmp_path), run)
    assert run.metrics.read_text().splitlines()[-1] == '{"step": 4}'


EXPERTS = "model.moe={num_experts=4,router_topk=2,ffn_hidden_size=96}"


@pytest.mark.parametrize(("tensor", "split"), [(1, 1), (2, 2), (2, 1)])
def test_experts_lie_on_other_ranks(tmp_path: Path, tensor: int, split: int) -> None:
    run = run_of(tmp_path)
    saved_with_experts(run, tensor, 2, split)
    sets = ["model.family=mixtral", EXPERTS, "cluster.ranks_per_node=4"]
    sets += [f"parallelism.tensor_model_parallel_size={tensor}"]
    sets += [f"parallelism.expert_tensor_parallel_size={split}"]
    MegatronLm().before_attempt(
        job_in(tmp_path, *sets, "parallelism.expert_model_parallel_size=2"), run
    )
    assert not MegatronLm().checkpoints(run, hashes=False)[0].problems
    with pytest.raises(ConfigError, match="with expert_model_parallel_size 2, and the job has 1"):
        MegatronLm().before_attempt(job_in(tmp_path, *sets), run)


def test_a_rank_of_experts_is_missing(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    saved_with_experts(run, 2, 2, 2)
    folder = run.checkpoints / "iter_0000004/mp_rank_01_001"
    folder.rename(run.root / "gone")
    (listed,) = MegatronLm().checkpoints(run, hashes=False)
    assert listed.problems == ["mp_rank 1_1 of 2 x 2 missing"]


def test_other_degrees_cannot_load_files_of_ranks(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    saved(run, 4, tensor=2, stages=2)
    degrees = ["parallelism.tensor_model_parallel_size=2", "cluster.ranks_per_node=4"]
    with pytest.raises(ConfigError, match="with pipeline_model_parallel_size 2, and the job has 1"):
        MegatronLm().before_attempt(job_in(tmp_path, *degrees), run)
    same = [*degrees, "parallelism.pipeline_model_parallel_size=2"]
    MegatronLm().before_attempt(job_in(tmp_path, *same), run)
