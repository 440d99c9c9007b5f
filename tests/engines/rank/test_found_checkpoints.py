"""Checkpoint folders as both engines write them, whole and damaged in every way that was seen."""

from __future__ import annotations

import json
import pickle
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from trainkit.engines.rank import gpt_neox, megatron_lm
from trainkit.engines.rank.saved_files import archive_problem, pickled_numbers, pickled_values

PROBLEMS = dict[int, tuple[str, ...]]


def problems(engine: ModuleType, folder: Path) -> PROBLEMS:
    """What the engine's reader says of each checkpoint in `folder`."""
    return {found.step: found.problems for found in engine.found_checkpoints(folder)}


def save(path: Path, **values: object) -> None:
    """A file of torch with `values` and a tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**values, "model": {"w": torch.arange(100)}}, path)


def megatron_torch(folder: Path, step: int, tensor: int = 2, pipeline: int = 1) -> Path:
    """As --ckpt-format torch writes it."""
    place = folder / f"iter_{step:07d}"
    args = Namespace(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    for t in range(tensor):
        for p in range(pipeline):
            name = f"mp_rank_{t:02d}"
            if pipeline > 1:
                name = f"{name}_{p:03d}"
            save(place / name / "model_optim_rng.pt", args=args, iteration=step)
    (folder / megatron_lm.TRACKER).write_text(str(step))
    return place


def megatron_dist(folder: Path, step: int) -> Path:
    """As --ckpt-format torch_dist writes it."""
    place = folder / f"iter_{step:07d}"
    place.mkdir(parents=True)
    save_distributed({"w": torch.arange(1000), "v": torch.ones(10, 10)}, checkpoint_id=place)
    save(place / "common.pt", iteration=step)
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (place / "metadata.json").write_text(json.dumps(backends))
    (folder / megatron_lm.TRACKER).write_text(str(step))
    return place


def neox(folder: Path, step: int, data: int = 2, model: int = 1, prefix: str = "") -> Path:
    """As GPT-NeoX with ZeRO-1 writes it."""
    place = folder / f"global_step{step}"
    sizes = {"dp_world_size": data, "mp_world_size": model}
    for m in range(model):
        save(place / f"mp_rank_{m:02d}_model_states.pt", **sizes)
        for d in range(data):
            name = f"{prefix}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
            save(place / name, optimizer_state_dict={})
    (folder / "latest").write_text(f"global_step{step}")
    return place


MAKERS = {
    "torch": (megatron_lm, megatron_torch, "mp_rank_01/model_optim_rng.pt"),
    "torch_dist": (megatron_lm, megatron_dist, "common.pt"),
    "neox": (gpt_neox, neox, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
}
Made = tuple[ModuleType, Callable[[Path, int], Path], str]


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest) -> Made:
    return MAKERS[request.param]


def test_whole_checkpoints(tmp_path: Path, made: Made) -> None:
    engine, make, _ = made
    for step in (3, 6, 1_000_000):
        make(tmp_path, step)
    assert problems(engine, tmp_path) == {3: (), 6: (), 1_000_000: ()}
    assert engine.tracked_step(tmp_path) == 1_000_000
    found = engine.found_checkpoints(tmp_path)[0]
    assert found.folder.is_dir()
    assert found.bytes == sum(p.stat().st_size for p in found.folder.rglob("*") if p.is_file())


def test_no_checkpoint(tmp_path: Path, made: Made) -> None:
    engine, _, _ = made
    assert engine.found_checkpoints(tmp_path) == []
    assert engine.found_checkpoints(tmp_path / "none") == []
    assert engine.tracked_step(tmp_path / "none") is None
    (tmp_path / "a file").write_text("")
    assert engine.found_checkpoints(tmp_path / "a file") == []


def test_an_empty_file(tmp_path: Path, made: Made) -> None:
    engine, make, name = made
    (make(tmp_path, 3) / name).write_bytes(b"")
    assert problems(engine, tmp_path) == {3: (f"{name} is empty",)}


def test_a_missing_file(tmp_path: Path, made: Made) -> None:
    engine, make, name = made
    (make(tmp_path, 3) / name).unlink()
    (problem,) = problems(engine, tmp_path)[3]
    assert "missing" in problem


def test_a_file_cut_off_anywhere(tmp_path: Path, made: Made) -> None:
    engine, make, name = made
    path = make(tmp_path, 3) / name
    whole = path.read_bytes()
    for size in {1, 10, len(whole) // 2, len(whole) - 100, len(whole) - 1}:
        path.write_bytes(whole[:size])
        (problem,) = problems(engine, tmp_path)[3]
        assert problem.startswith(f"{name} is cut off or damaged")


def test_a_missing_tracker(tmp_path: Path, made: Made) -> None:
    """The engine would start from random weights."""
    engine, make, _ = made
    make(tmp_path, 3)
    tracker = tmp_path / engine.TRACKER
    tracker.unlink()
    assert engine.tracked_step(tmp_path) is None
    assert problems(engine, tmp_path) == {
        3: (f"there is no {tracker.name} that names a checkpoint",)
    }


def test_a_tracker_that_names_a_missing_folder(tmp_path: Path, made: Made) -> None:
    engine, make, _ = made
    tracker = tmp_path / engine.TRACKER
    make(tmp_path, 6).rename(tmp_path / "moved")
    (problem,) = problems(engine, tmp_path)[6]
    assert problem.startswith(f"{tracker.name} names ")
    assert "no such folder" in problem


def test_what_is_newer_than_the_tracker_was_not_saved_to_its_end(
    tmp_path: Path, made: Made
) -> None:
    engine, make, _ = made
    make(tmp_path, 6)
    make(tmp_path, 3)
    assert [bool(wrong) for _, wrong in sorted(problems(engine, tmp_path).items())] == [False, True]


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("3", 3),
        (" 12\n", 12),
        ("release", 0),
        ("", None),
        ("iter_3", None),
        ("-1", None),
        ("٣", None),
        ("\0" * 8, None),
        ("3.5", None),
    ],
)
def test_megatrons_tracker(tmp_path: Path, said: str, step: int | None) -> None:
    (tmp_path / megatron_lm.TRACKER).write_text(said)
    assert megatron_lm.tracked_step(tmp_path) == step


@pytest.mark.parametrize(
    ("said", "step"),
    [("global_step3", 3), ("global_step30\n", 30), ("3", None), ("best", None), ("", None)],
)
def test_neoxs_tracker(tmp_path: Path, said: str, step: int | None) -> None:
    (tmp_path / "latest").write_text(said)
    assert gpt_neox.tracked_step(tmp_path) == step


def test_a_tracker_that_is_a_folder(tmp_path: Path, made: Made) -> None:
    engine, make, _ = made
    make(tmp_path, 3)
    (tmp_path / engine.TRACKER).unlink()
    (tmp_path / engine.TRACKER).mkdir()
    assert engine.tracked_step(tmp_path) is None
    assert engine.found_checkpoints(tmp_path)[0].problems


def test_megatrons_release(tmp_path: Path) -> None:
    megatron_torch(tmp_path, 1).rename(tmp_path / "release")
    (tmp_path / megatron_lm.TRACKER).write_text("release")
    assert problems(megatron_lm, tmp_path) == {0: ()}


def test_megatrons_ranks_are_all_there(tmp_path: Path) -> None:
    """The last ones too, which no gap shows: the files say how many there are."""
    place = megatron_torch(tmp_path, 3, tensor=2, pipeline=3)
    assert problems(megatron_lm, tmp_path) == {3: ()}
    (place / "mp_rank_01_002" / "model_optim_rng.pt").unlink()
    (place / "mp_rank_01_002").rmdir()
    assert problems(megatron_lm, tmp_path) == {3: ("mp_rank 1_2 of 2 x 3 missing",)}
    for stage in range(2):
        (place / f"mp_rank_01_{stage:03d}").rename(tmp_path / f"gone{stage}")
    assert problems(megatron_lm, tmp_path) == {3: ("mp_rank 1_0, 1_1, 1_2 of 2 x 3 missing",)}


def test_megatrons_optimizer_is_every_ranks(tmp_path: Path) -> None:
    place = megatron_torch(tmp_path, 3)
    save(place / "mp_rank_00" / "distrib_optim.pt")
    assert problems(megatron_lm, tmp_path) == {3: ("mp_rank_01/distrib_optim.pt is missing",)}
    save(place / "mp_rank_01" / "distrib_optim.pt")
    assert problems(megatron_lm, tmp_path) == {3: ()}


def test_a_failed_distributed_save(tmp_path: Path) -> None:
    """What 0.12 left with torch 2.13: empty files, no .metadata, no tracker."""
    place = tmp_path / "iter_0000003"
    place.mkdir()
    for name in ("__0_0.distcp", "common.pt"):
        (place / name).write_bytes(b"")
    assert problems(megatron_lm, tmp_path) == {
        3: (
            "there is no latest_checkpointed_iteration.txt that names a checkpoint",
            "metadata.json is missing",
            "common.pt is empty",
            ".metadata is missing: the save did not end",
        )
    }


def test_parts_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    place = megatron_dist(tmp_path, 3)
    part = place / "__0_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    (problem,) = problems(megatron_lm, tmp_path)[3]
    assert problem.startswith(f"__0_0.distcp is cut off: {len(whole) - 1} of ")
    part.write_bytes(b"")
    assert problems(megatron_lm, tmp_path) == {3: ("__0_0.distcp is empty",)}
    part.unlink()
    named = "__0_0.distcp, which .metadata names, is missing"
    assert problems(megatron_lm, tmp_path) == {3: (named,)}
    part.write_bytes(whole)
    metadata = (place / ".metadata").read_bytes()
    (place / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    (problem,) = problems(megatron_lm, tmp_path)[3]
    assert problem.startswith(".metadata is cut off or damaged")


def test_core_0_19_has_no_common_file(tmp_path: Path) -> None:
    place = megatron_dist(tmp_path, 3)
    (place / "common.pt").unlink()
    assert problems(megatron_lm, tmp_path) == {3: ("common.pt is missing",)}
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert problems(megatron_lm, tmp_path) == {3: ()}
    (place / "metadata.json").unlink()
    (place / "common.pt").write_bytes(b"")
    wrong = ("metadata.json is missing", "common.pt is empty")
    assert problems(megatron_lm, tmp_path) == {3: wrong}


def test_torch_dcp_needs_neither_common_nor_json(tmp_path: Path) -> None:
    place = megatron_dist(tmp_path, 3)
    (place / "common.pt").unlink()
    (place / "metadata.json").unlink()
    assert problems(megatron_lm, tmp_path) == {3: ()}


def test_a_folder_with_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / megatron_lm.TRACKER).write_text("3")
    (problem,) = problems(megatron_lm, tmp_path)[3]
    assert "nothing that can be loaded" in problem
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    (problem,) = problems(gpt_neox, tmp_path)[3]
    assert "nothing that can be loaded" in problem


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_neoxs_ranks_are_all_there(tmp_path: Path, prefix: str) -> None:
    place = neox(tmp_path, 3, data=3, model=2, prefix=prefix)
    assert problems(gpt_neox, tmp_path) == {3: ()}
    (place / f"{prefix}zero_pp_rank_2_mp_rank_01_optim_states.pt").unlink()
    missing = "optimizer states of rank 2_1 of 3 x 2 missing"
    assert problems(gpt_neox, tmp_path) == {3: (missing,)}
    (place / "mp_rank_01_model_states.pt").unlink()
    assert problems(gpt_neox, tmp_path) == {3: ("model states of rank 1 of 2 missing", missing)}


def test_neox_without_zero_has_no_optimizer_files(tmp_path: Path) -> None:
    place = neox(tmp_path, 3)
    for path in place.glob("zero*"):
        path.unlink()
    assert problems(gpt_neox, tmp_path) == {3: ()}


def test_neox_with_zero_3_has_a_model_file_a_rank(tmp_path: Path) -> None:
    place = neox(tmp_path, 3)
    (place / "mp_rank_00_model_states.pt").unlink()
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        save(place / name, dp_world_size=2, mp_world_size=1)
    assert problems(gpt_neox, tmp_path) == {3: ()}
    (place / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    missing = "model states of rank 1_0 of 2 x 1 missing"
    assert problems(gpt_neox, tmp_path) == {3: (missing,)}


def test_neoxs_layers_of_every_rank(tmp_path: Path) -> None:
    """Layers without weights have no file (1 and 4 here)."""
    place = neox(tmp_path, 3, model=2)
    for layer in (0, 2, 3, 5):
        for rank in range(2):
            save(place / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    assert problems(gpt_neox, tmp_path) == {3: ()}
    (place / "layer_03-model_01-model_states.pt").unlink()
    missing = "layer 3 of tensor-parallel rank 1 is missing"
    assert problems(gpt_neox, tmp_path) == {3: (missing,)}


class Trap:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('executed')",)


def test_judging_executes_nothing(tmp_path: Path) -> None:
    place = megatron_torch(tmp_path, 3, tensor=1)
    save(place / "mp_rank_00" / "model_optim_rng.pt", trap=Trap(), tensor_model_parallel_size=1)
    assert problems(megatron_lm, tmp_path) == {3: ()}
    dist = megatron_dist(tmp_path, 6)
    (dist / ".metadata").write_bytes(pickle.dumps(Trap()))
    assert problems(megatron_lm, tmp_path)[6] == ()


def test_a_file_of_old_torch_and_one_of_another_program(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert archive_problem(tmp_path / "old.pt") is None
    (tmp_path / "other.pt").write_bytes(b"#!/bin/sh\n" * 100)
    assert "cut off or damaged" in str(archive_problem(tmp_path / "other.pt"))
    (tmp_path / "folder.pt").mkdir()
    assert "cut off or damaged" in str(archive_problem(tmp_path / "folder.pt"))


KEYS = st.sampled_from(["dp_world_size", "mp_world_size", "x", "y"])


@given(st.dictionaries(KEYS, st.one_of(st.integers(), st.text(max_size=3), st.none())))
def test_numbers_are_found_as_pickled(state: dict[str, object]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"deep": [state], "again": dict.fromkeys(state)}, file)
        file.flush()
        numbers = pickled_numbers(Path(file.name), ("dp_world_size", "mp_world_size"))
    expected = {k: v for k, v in state.items() if isinstance(v, int) and "world" in k}
    assert numbers == expected


@given(st.binary(max_size=200), st.integers(0, 5))
def test_no_bytes_are_too_odd(noise: bytes, protocol: int) -> None:
    for data in (noise, pickle.dumps({"a": [1, "b"]}, protocol)[: len(noise)] + noise):
        try:
            list(pickled_values(data))
        except ValueError:
            continue


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6))
def test_no_archive_is_too_odd(changes: list[tuple[int, int]]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"a": 1, "b": "c"}, file)
        for position, byte in changes:
            file.seek(position)
            file.write(bytes([byte]))
        file.flush()
        archive_problem(Path(file.name))
        pickled_numbers(Path(file.name), ("a",))
