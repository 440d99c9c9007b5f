"""What is left for NeMo to go on from: one whole "-last", whatever was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.nemo.test_nemo_config import configuration, nemo_job, newer_job
from tests.engines.rank.test_nemo_checkpoints import name_of, save_folder, save_ranks
from trainkit.base.errors import ConfigError
from trainkit.engines.nemo.engine import Nemo, checkpoint_folder
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "nemo-gpt3-20b" / "20261122-120000-abcd")
    run.path.mkdir(parents=True)
    run.checkpoints.mkdir()
    checkpoint_folder(run).mkdir(parents=True)
    return run


@pytest.fixture(scope="module")
def job() -> Job:
    return nemo_job("nemo-gpt3-20b")  # TP 4, one stage


def lasts(run: RunFolder) -> set[str]:
    """Names that `resume_if_exists` of 22.09 finds."""
    return {path.name for path in checkpoint_folder(run).rglob("*last.ckpt")}


def test_a_run_begins_with_a_folder_that_all_find(run: RunFolder, job: Job) -> None:
    Nemo().before_attempt(job, run)
    assert run.checkpoints.is_symlink()
    assert run.checkpoints.resolve() == checkpoint_folder(run)
    assert (run.path / "joblog.log").readlink() == run.attempt(1).log(0).relative_to(run.path)
    run.attempt(1).path.mkdir(parents=True)
    save_ranks(checkpoint_folder(run), 2000, 4, last=True)
    Nemo().before_attempt(job, run)
    assert (run.path / "joblog.log").readlink() == run.attempt(2).log(0).relative_to(run.path)
    listed = Nemo().checkpoints(run, hashes=False)
    assert [(each.step, each.problems) for each in listed] == [(2000, [])]
    assert Nemo().checkpoint_names(run) == [name_of(2000, last=True)]


def test_rows_after_the_checkpoint_are_taken_back(run: RunFolder, job: Job) -> None:
    save_ranks(checkpoint_folder(run), 2000, 4, last=True)
    rows = [{"step": step, "lm_loss": 1.0} for step in (1990, 2000, 2010)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Nemo().before_attempt(job, run)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [
        1990,
        2000,
    ]


def test_of_two_last_ones_the_newer_stays(run: RunFolder, job: Job) -> None:
    """Killed between the new one and the removal of the old: NeMo takes any of the files."""
    folder = checkpoint_folder(run)
    save_ranks(folder, 2000, 4, last=True)
    save_ranks(folder, 4000, 4, last=True)
    Nemo().before_attempt(job, run)
    assert lasts(run) == {f"{name_of(4000, last=True)}.ckpt"}


def test_a_last_one_cut_short_is_set_aside(run: RunFolder, job: Job) -> None:
    folder = checkpoint_folder(run)
    save_ranks(folder, 2000, 4, last=True)
    save_ranks(folder, 4000, 4, last=True)
    cut = folder / "mp_rank_03" / f"{name_of(4000, last=True)}.ckpt"
    cut.write_bytes(cut.read_bytes()[:50])
    Nemo().before_attempt(job, run)
    assert lasts(run) == {f"{name_of(2000, last=True)}.ckpt"}
    aside = folder.parent / "set-aside"
    assert len(list(aside.rglob("*last.ckpt"))) == 4
    # and again, the same names
    save_ranks(folder, 4000, 4, last=True)
    cut.write_bytes(b"")
    Nemo().before_attempt(job, run)
    assert lasts(run) == {f"{name_of(2000, last=True)}.ckpt"}


def test_without_a_last_one_the_best_is_named(run: RunFolder, job: Job) -> None:
    """model.resume_from_checkpoint, without the folders of ranks, which NeMo puts in."""
    folder = checkpoint_folder(run)
    save_ranks(folder, 2000, 4)
    save_ranks(folder, 4000, 4, last=True)
    (folder / "mp_rank_00" / f"{name_of(4000, last=True)}.ckpt").write_bytes(b"")
    run.metrics.write_text("".join(json.dumps({"step": n}) + "\n" for n in (2000, 2010)))
    Nemo().before_attempt(job, run)
    assert run.metrics.read_text() == '{"step": 2000}\n'
    assert lasts(run) == set()
    resumed = configuration(Nemo().command(job, run, 2))["model.resume_from_checkpoint"]
    assert resumed == str(folder / f"{name_of(2000)}.ckpt")
    save_ranks(folder, 6000, 4, last=True)
    assert configuration(Nemo().command(job, run, 3))["model.resume_from_checkpoint"] is None


def test_the_marker_of_an_unfinished_best_one_stays(run: RunFolder, job: Job) -> None:
    """Its files are in the ranks' folders, and without the marker it would count as whole."""
    folder = checkpoint_folder(run)
    save_ranks(folder, 2000, 4)
    save_ranks(folder, 4000, 4)
    marker = folder / f"{name_of(4000)}-unfinished"
    marker.touch()
    Nemo().before_attempt(job, run)
    assert marker.exists()
    resumed = configuration(Nemo().command(job, run, 2))["model.resume_from_checkpoint"]
    assert resumed == str(folder / f"{name_of(2000)}.ckpt")


def test_unfinished_ones_of_24_12_are_set_aside(run: RunFolder) -> None:
    """exp_manager raises where the only last one is unfinished."""
    job = newer_job("175b")
    folder = checkpoint_folder(run)
    place = save_folder(folder, 4000, last=True)
    marker = folder / f"{place.name}-unfinished"
    marker.touch()
    orphan = folder / f"{name_of(2000, last=True)}-unfinished"
    orphan.touch()
    Nemo().before_attempt(job, run)
    assert not place.exists()
    assert not marker.exists()
    assert not orphan.exists()
    assert (folder.parent / "set-aside" / place.name).is_dir()
    # exp_manager reads it there, where the launcher's file has no key for it
    best = save_folder(folder, 1000)
    key = "exp_manager.resume_from_checkpoint"
    assert configuration(Nemo().command(job, run, 2))[key] == str(best)
    save_folder(folder, 6000, last=True)
    Nemo().before_attempt(job, run)
    assert Nemo().resume_problems(job, run) == []
    assert key not in configuration(Nemo().command(job, run, 3))


def test_files_of_ranks_are_read_by_as_many(run: RunFolder, job: Job) -> None:
    save_ranks(checkpoint_folder(run), 2000, 2, 3, last=True)
    (problem,) = Nemo().resume_problems(job, run)
    assert "tensor_model_parallel_size 2 and pipeline_model_parallel_size 3" in problem.message
    with pytest.raises(ConfigError, match="the job has 4 and 1"):
        Nemo().before_attempt(job, run)
    assert Nemo().resume_problems(newer_job("175b"), run), "files of ranks, whatever reads them"


def test_versions(tmp_path: Path, job: Job) -> None:
    assert Nemo().version_of(job) == "22.09"
    assert Nemo().version_of(newer_job("5b")) == "24.12"
    assert job.engine_source is not None
    for numbers, version in {
        (1, 12, 0): "22.09",
        (2, 1, 0): "24.12",
        (1, 20, 0): "22.09-nemo-1.20.0",
    }.items():
        tree = tmp_path / version
        script = tree / "examples/nlp/language_modeling/megatron_gpt_pretraining.py"
        script.parent.mkdir(parents=True)
        script.touch()
        (tree / "nemo").mkdir()
        text = "\n".join(
            f"{name} = {number}"
            for name, number in zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
        )
        (tree / "nemo" / "package_info.py").write_text(text)
        source = job.engine_source.model_copy(update={"source": str(tree)})
        asked = job.model_copy(update={"engine_source": source})
        assert Nemo().version_of(asked) == version
    assert any("checked against 22.09" in note for note in Nemo().notes(asked))
    source = job.engine_source.model_copy(update={"source": str(tmp_path)})
    (problem,) = Nemo().problems(job.model_copy(update={"engine_source": source}))
    assert "is not a tree of nemo" in problem.message


def test_notes() -> None:
    assert Nemo().notes(nemo_job("nemo-gpt3-20b")) == []
    (note,) = Nemo().notes(nemo_job("nemo-gpt3-175b16"))
    assert "nothing is saved" in note
    job = nemo_job("nemo-gpt3-20b")
    given = {key: value for key, value in job.engine_args.items() if key != "trainer.max_time"}
    (note,) = Nemo().notes(job.model_copy(update={"engine_args": given}))
    assert "saves nothing when it is asked to stop" in note
    (note,) = Nemo().notes(newer_job("175b"))
    assert "+exp_manager.max_time_per_run" in note


def test_its_own_time_limit_is_no_early_end(run: RunFolder, job: Job) -> None:
    def spec_of(changed: Job) -> dict[str, object]:
        command = Nemo().command(changed, run, 1)
        found: dict[str, object] = json.loads(command.files["launch/engine-rank-1.json"])
        return found

    assert spec_of(job)["ends_in_time"] is True
    given = {key: value for key, value in job.engine_args.items() if key != "trainer.max_time"}
    assert spec_of(job.model_copy(update={"engine_args": given}))["ends_in_time"] is False
