"""Checkpoints as NeMo's exp_manager leaves them: of one rank, of tensor- and pipeline-parallel
ranks, distributed ones, the last one, and those whose save did not end."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tests.engines.rank.test_nemo_lines import spec_of
from trainkit.engines.rank import nemo
from trainkit.engines.rank.end import EngineEnd, Verdict, judge_end

# filename: 'megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}', as pytorch-lightning fills it
NAME = "megatron_gpt--val_loss=2.31-step={step}-consumed_samples={samples}.0"


def name_of(step: int, *, last: bool = False) -> str:
    name = NAME.format(step=step, samples=(step - 1) * 256)
    if last:
        name += "-last"
    return name


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {"w": torch.arange(100)}, "global_step": 3}, path)


def save_ranks(folder: Path, step: int, tensor: int = 1, stages: int = 1, **last: bool) -> None:
    """A checkpoint in files: inject_model_parallel_rank of nemo/utils/model_utils.py."""
    for t, p in product(range(tensor), range(stages)):
        place = folder
        if stages > 1:
            place = folder / f"tp_rank_{t:02d}_pp_rank_{p:03d}"
        elif tensor > 1:
            place = folder / f"mp_rank_{t:02d}"
        save(place / f"{name_of(step, **last)}.ckpt")


def save_folder(folder: Path, step: int, **last: bool) -> Path:
    """A distributed checkpoint: a folder without .ckpt (dist_ckpt_format torch_dist)."""
    place = folder / name_of(step, **last)
    place.mkdir(parents=True)
    save_distributed({"w": torch.arange(1000)}, checkpoint_id=place)
    torch.save({"global_step": step}, place / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (place / "metadata.json").write_text(json.dumps(backends))
    return place


def listed(folder: Path) -> list[tuple[int, str, tuple[str, ...]]]:
    """(step, name, problems) of each."""
    found = nemo.found_checkpoints(folder)
    return [(each.step, each.folder.name, each.problems) for each in found]


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (2, 3)])
def test_files_of_each_layout(tmp_path: Path, tensor: int, stages: int) -> None:
    for step in (2000, 4000):
        save_ranks(tmp_path, step, tensor, stages)
    save_ranks(tmp_path, 4000, tensor, stages, last=True)
    (tmp_path / "megatron_gpt.nemo").write_bytes(b"an archive of weights, no checkpoint")
    assert listed(tmp_path) == [
        (2000, f"{name_of(2000)}.ckpt", ()),
        (4000, f"{name_of(4000)}.ckpt", ()),
        (4000, f"{name_of(4000, last=True)}.ckpt", ()),
    ]
    assert nemo.tracked_step(tmp_path) == 4000
    found = nemo.found_checkpoints(tmp_path)[0]
    # what `model.resume_from_checkpoint` takes: NeMo puts the ranks' folders into it
    assert found.folder.parent == tmp_path
    paths = list(tmp_path.rglob(f"{name_of(2000)}.ckpt"))
    assert len(paths) == tensor * stages
    assert found.bytes == sum(path.stat().st_size for path in paths)


def test_the_last_one_alone_is_gone_on_from(tmp_path: Path) -> None:
    """check_resume looks for "*last.ckpt"; the best ones are kept beside it, and stand in for it
    where it is gone."""
    save_ranks(tmp_path, 2000, last=True)
    save_ranks(tmp_path, 4000)
    assert nemo.tracked_step(tmp_path) == 2000
    save_ranks(tmp_path, 2500)
    second = tmp_path / f"{name_of(2500, last=True)}-v1.ckpt"
    (tmp_path / f"{name_of(2500)}.ckpt").rename(second)
    assert nemo.tracked_step(tmp_path) == 2000, "NeMo does not find -last-v1"
    assert [step for step, _, _ in listed(tmp_path)] == [2000, 2500, 4000]
    (tmp_path / f"{name_of(2000, last=True)}.ckpt").unlink()
    assert nemo.tracked_step(tmp_path) == 4000
    (tmp_path / f"{name_of(4000)}.ckpt").write_bytes(b"")
    assert nemo.tracked_step(tmp_path) == 2500


def test_a_rank_without_its_file(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2000, 2, 2, last=True)
    save_ranks(tmp_path, 4000, 2, 2, last=True)
    (tmp_path / "tp_rank_01_pp_rank_001" / f"{name_of(4000, last=True)}.ckpt").unlink()
    (_, _, before), (_, _, problems) = listed(tmp_path)
    assert before == ()
    assert problems == ("rank 1_1 of 2 x 2 missing",)


@pytest.mark.parametrize("cut", [0, 100])
def test_a_file_cut_off(tmp_path: Path, cut: int) -> None:
    save_ranks(tmp_path, 2000, 2)
    path = tmp_path / "mp_rank_01" / f"{name_of(2000)}.ckpt"
    path.write_bytes(path.read_bytes()[:cut])
    ((_, _, (problem,)),) = listed(tmp_path)
    assert problem.startswith(f"mp_rank_01/{path.name} is ")


def test_distributed_checkpoints(tmp_path: Path) -> None:
    save_folder(tmp_path, 2000)
    place = save_folder(tmp_path, 4000, last=True)
    assert listed(tmp_path) == [
        (2000, name_of(2000), ()),
        (4000, name_of(4000, last=True), ()),
    ]
    assert nemo.tracked_step(tmp_path) == 4000
    (place / ".metadata").unlink()
    (_, _, problems) = listed(tmp_path)[1]
    assert problems == (".metadata is missing: the save did not end",)
    for each in place.iterdir():
        each.unlink()
    (_, _, problems) = listed(tmp_path)[1]
    assert "metadata.json is missing" in problems


@pytest.mark.parametrize("distributed", [False, True])
def test_a_marker_says_that_a_save_did_not_end(tmp_path: Path, distributed: bool) -> None:
    """NeMo 2: NAME-unfinished, without .ckpt and without the ranks' folders."""
    if distributed:
        save_folder(tmp_path, 2000, last=True)
    else:
        save_ranks(tmp_path, 2000, 2, last=True)
    marker = tmp_path / f"{name_of(2000, last=True)}-unfinished"
    marker.touch()
    assert nemo.tracked_step(tmp_path) is None
    ((_, _, problems),) = listed(tmp_path)
    assert problems == (f"{marker.name} says that it was not saved to its end",)
    marker.unlink()
    assert nemo.tracked_step(tmp_path) == 2000


def test_tensors_beside_a_file(tmp_path: Path) -> None:
    """neuronx-nemo-megatron with save_xser: NAME.ckpt names them, NAME.ckpt.tensors holds them."""
    name = "megatron_gpt--step=1085-consumed_samples=69632.0-last.ckpt"
    save(tmp_path / "tp_rank_00_pp_rank_000" / name)
    tensors = tmp_path / "tp_rank_00_pp_rank_000" / f"{name}.tensors"
    tensors.mkdir()
    (tensors / "tensor_0.pt").write_bytes(b"x" * 1000)
    (found,) = nemo.found_checkpoints(tmp_path)
    assert (found.step, found.problems) == (1085, ())
    assert found.bytes > 1000
    (tensors / "tensor_1.pt").touch()
    assert nemo.found_checkpoints(tmp_path)[0].problems == (
        f"tp_rank_00_pp_rank_000/{name}.tensors/tensor_1.pt is empty",
    )


def test_nothing_is_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert nemo.found_checkpoints(folder) == []
        assert nemo.tracked_step(folder) is None
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "other.ckpt").touch()
    assert nemo.found_checkpoints(tmp_path) == []


ZERO = EngineEnd(code=0, began_at=0, asked_to_save=False, last_iteration=7, last_lines=[])


def test_success_is_a_whole_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    folder = Path(spec.checkpoints)
    folder.mkdir(parents=True)
    save_ranks(folder, 6, 2, last=True)
    verdict = judge_end(spec, nemo, ZERO)
    assert isinstance(verdict, Verdict)
    assert "its last checkpoint is of iteration 6" in verdict.message
    save_ranks(folder, 7, 2, last=True)
    assert judge_end(spec, nemo, ZERO) is None
    (folder / "mp_rank_00" / f"{name_of(7, last=True)}.ckpt").write_bytes(b"")
    verdict = judge_end(spec, nemo, ZERO)
    assert isinstance(verdict, Verdict)
    assert verdict.type == "DamagedCheckpoint"


def test_without_checkpoints_the_last_line_of_any_rank_is_success(tmp_path: Path) -> None:
    """exp_manager.create_checkpoint_callback = false: rank 0 alone draws a bar."""
    spec = replace(spec_of(tmp_path), saves=False)
    assert judge_end(spec, nemo, ZERO) is None
    other_rank = replace(ZERO, last_iteration=None)
    verdict = judge_end(spec, nemo, other_rank)
    assert verdict is not None
    assert verdict.message.endswith("ended with 0 after iteration 0 of 7: training is not done")
    rows = [{"step": 6}, {"step": 9, "eval": "valid"}]
    Path(spec.metrics).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 7')
    verdict = judge_end(spec, nemo, other_rank)
    assert verdict is not None
    assert "after iteration 6 of 7" in verdict.message
    Path(spec.metrics).write_text('ep": 3}\n' + json.dumps({"step": 7}) + "\n")
    assert judge_end(spec, nemo, other_rank) is None
    asked = replace(other_rank, asked_to_save=True)
    assert judge_end(spec, nemo, asked) is None
    killed = replace(ZERO, code=1)
    assert judge_end(spec, nemo, killed) is not None


def test_its_own_time_is_up(tmp_path: Path) -> None:
    """trainer.max_time: it saves and ends with 0; with that checkpoint the run goes on."""
    spec = spec_of(tmp_path)
    folder = Path(spec.checkpoints)
    folder.mkdir(parents=True)
    save_ranks(folder, 5, last=True)
    for end in (replace(ZERO, last_iteration=5), replace(ZERO, last_iteration=None, began_at=3)):
        verdict = judge_end(replace(spec, ends_in_time=True), nemo, end)
        assert verdict is not None
        assert (verdict.exit, verdict.message) == (12, "")
        early = judge_end(spec, nemo, end)
        assert early is not None
        assert early.type == "EngineEndedEarly"
    # no step was made since it began, or none was saved
    for end in (replace(ZERO, last_iteration=None, began_at=5), replace(ZERO, last_iteration=6)):
        verdict = judge_end(replace(spec, ends_in_time=True), nemo, end)
        assert verdict is not None
        assert verdict.exit == 9
