"""How a run of GPT-NeoX goes on, and what it would do wrong by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.engines.gpt_neox.config import NeoxData, neox_config, yaml_text
from trainkit.engines.gpt_neox.engine import (
    GptNeox,
    attempt_config,
    saved_config,
)
from trainkit.engines.rank import gpt_neox as reader
from trainkit.engines.rank.readings import FoundCheckpoint
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
DATA = NeoxData("/data/enron_text_document", "969,30,1", {})


def job_of(*sets: str) -> Job:
    return load(ROOT, environ={}).resolve("gpt-neox-2-7b", ["engine=gpt-neox", *sets]).job


def saved(tmp_path: Path, job: Job, step: int) -> RunFolder:
    """A run whose newest checkpoint that job wrote, as far as it is looked at here."""
    run = RunFolder(tmp_path / "runs" / "job" / "one")
    configs = run.checkpoints / f"global_step{step}" / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / f"{job.name}.yml").write_text(yaml_text(neox_config(job, run, DATA)))
    (run.checkpoints / "latest").write_text(f"global_step{step}")
    return run


def judged(monkeypatch: pytest.MonkeyPatch, damage: Mapping[int, tuple[str, ...]]) -> None:
    """Have the checkpoints of these steps judged so."""
    monkeypatch.setattr(
        reader,
        "found_checkpoints",
        lambda folder: [
            FoundCheckpoint(step, folder / f"global_step{step}", 1, problems)
            for step, problems in damage.items()
        ],
    )


def test_it_goes_on_from_its_own_checkpoint_with_the_same_schedule(tmp_path: Path) -> None:
    job = job_of()
    run = saved(tmp_path, job, 7)
    before = saved_config(run)
    assert before and before["lr_decay_iters"] == 320000
    config = attempt_config(job, run, DATA)
    assert config["load"] == str(run.checkpoints)
    assert "override_lr_scheduler" not in config
    assert GptNeox().resume_problems(job, run) == []


def test_a_longer_run_would_learn_faster_again_and_is_refused(tmp_path: Path) -> None:
    """engines.md 6: the cosine goes on past lr_decay_iters, and so up again. What `resume` makes
    of --set training.train_iters keeps the end of the decay."""
    longer = job_of("training.train_iters=400000", "training.lr_decay_iters=320000")
    (problem,) = GptNeox().problems(longer)
    assert "gpt-neox's cosine rises again after its end" in problem.message
    assert "--set training.lr_decay_iters=400000" in problem.hint


def test_a_new_end_of_the_decay_is_told_to_the_engine(tmp_path: Path) -> None:
    """Without override_lr_scheduler AnnealingLR.load_state_dict asserts that nothing changed."""
    run = saved(tmp_path, job_of(), 7)
    longer = job_of("training.train_iters=400000", "training.lr_decay_iters=400000")
    assert GptNeox().problems(longer) == []
    assert attempt_config(longer, run, DATA)["override_lr_scheduler"] is True
    kept = job_of(
        "training.train_iters=400000",
        "training.lr_decay_iters=400000",
        "engine_args.use_checkpoint_lr_scheduler=true",
    )
    assert "override_lr_scheduler" not in attempt_config(kept, run, DATA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "parallelism.tensor_model_parallel_size=2",
            "parallelism.tensor_model_parallel_size = 2: the run's checkpoint was written with 1",
        ),
        (
            "parallelism.pipeline_model_parallel_size=2",
            "parallelism.pipeline_model_parallel_size = 2: the run's checkpoint was written with 1",
        ),
        ("nodes=1", "nodes = 1: the run's checkpoint was written by 8 data-parallel ranks"),
    ],
)
def test_another_layout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, said: str
) -> None:
    run = saved(tmp_path, job_of(), 7)
    judged(monkeypatch, {7: ()})
    (problem,) = GptNeox().resume_problems(job_of(change), run)
    assert said in problem.message
    with pytest.raises(ConfigError, match="the run's checkpoint was written"):
        GptNeox().before_attempt(job_of(change), run)


def test_without_zero_other_ranks_read_the_checkpoint(tmp_path: Path) -> None:
    run = saved(tmp_path, job_of("parallelism.zero_stage=0"), 7)
    assert GptNeox().resume_problems(job_of("parallelism.zero_stage=0", "nodes=1"), run) == []


def test_weights_to_begin_with_must_be_there(tmp_path: Path) -> None:
    """GPT-NeoX says "Unable to load checkpoint." and begins with random weights."""
    run = RunFolder(tmp_path / "runs" / "job" / "one")
    job = job_of(f"engine_args.load={tmp_path}/slim", "engine_args.finetune=true")
    with pytest.raises(ConfigError, match="holds no checkpoint of gpt-neox"):
        attempt_config(job, run, DATA)
    (tmp_path / "slim").mkdir()
    (tmp_path / "slim" / "latest").write_text("global_step150000")
    first = attempt_config(job, run, DATA)
    assert (first["load"], first["finetune"]) == (f"{tmp_path}/slim", True)
    saved(tmp_path, job, 7)
    later = attempt_config(job, run, DATA)
    assert (later["load"], later["finetune"]) == (str(run.checkpoints), False)


def test_a_damaged_newest_checkpoint_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` names the newest whole one before an attempt begins."""
    run = saved(tmp_path, job_of(), 9)
    damage: dict[int, tuple[str, ...]] = {
        5: (),
        7: (),
        9: ("mp_rank_00_model_states.pt is cut short",),
    }
    judged(monkeypatch, damage)
    saved(tmp_path, job_of(), 9)
    GptNeox().before_attempt(job_of(), run)
    assert (run.checkpoints / "latest").read_text() == "global_step7"
    damage.clear()
    GptNeox().before_attempt(job_of(), run)
    assert not (run.checkpoints / "latest").exists()


def test_a_configuration_that_others_wrote_is_no_obstacle(tmp_path: Path) -> None:
    job = job_of()
    run = saved(tmp_path, job, 7)
    path = run.checkpoints / "global_step7" / "configs" / f"{job.name}.yml"
    path.write_text("# their own\n{ 'a': True, }\n")
    assert saved_config(run) == {}
    assert GptNeox().resume_problems(job, run) == []
    assert json.loads(yaml_text({"eps": 1e-8})) == {"eps": 1e-8}
