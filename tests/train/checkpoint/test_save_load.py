"""Checkpoints that lie are found out; nothing in one is ever executed."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from tests.train.support import MODEL, Arrays, whole
from trainkit.base.errors import TrainkitError
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import (
    DamagedCheckpoint,
    checkpoint_folder,
    newest_valid,
    open_checkpoint,
    verify,
)
from trainkit.runs.manifest import MANIFEST, DataFile, Manifest, TensorChunk, TensorEntry
from trainkit.runs.retention import prune
from trainkit.train.checkpoint import dcp_storage as storage, save_load as checkpoint
from trainkit.train.checkpoint.dcp_storage import DcpReader, DcpWriter, TensorSavePlanner
from trainkit.train.model.transformer import Transformer

Change = Callable[[dict[str, Any]], Any]


def step_folder(folder: Path) -> Path:
    return folder / "step-00000003"


def change_manifest(folder: Path, change: Change) -> None:
    path = step_folder(folder) / MANIFEST
    document = json.loads(path.read_text())
    del document["xxh128"]  # one of an older version, so that only the change is wrong
    change(document)
    path.write_text(json.dumps(document))


def copy_as(folder: Path, step: int) -> Path:
    """A later checkpoint with the same tensors."""
    other = Path(shutil.copytree(step_folder(folder), folder / f"step-{step:08d}"))
    open_checkpoint(step_folder(folder)).manifest.model_copy(update={"step": step}).write(other)
    return other


def load_model(folder: Path) -> Transformer:
    module = Transformer(MODEL, 301)
    checkpoint.load(
        open_checkpoint(folder), {f"model.{n}": p.detach() for n, p in module.named_parameters()}
    )
    return module


def test_manifest_has_the_form_of_the_design(saved_folder: Path) -> None:
    document = json.loads((step_folder(saved_folder) / MANIFEST).read_text())
    assert list(document) == [
        "schema",
        "step",
        "consumed_samples",
        "files",
        "tensors",
        "layout",
        "job",
        "versions",
        "state",
        "validation",
        "xxh128",
    ]
    assert (document["schema"], document["step"], document["consumed_samples"]) == (
        "checkpoint/1",
        3,
        24,
    )
    assert [f["path"] for f in document["files"]] == ["rank-00000.bin", "rank-00001.bin"]
    entry = document["tensors"]["model.embed_tokens.weight"]
    assert (entry["shape"], entry["dtype"], [c["sizes"] for c in entry["chunks"]]) == (
        [301, 18],
        "float32",
        [[151, 18], [150, 18]],
    )
    assert document["layout"]["data_parallel_size"] == 2 and document["job"]["name"] == "tiny"
    assert verify(step_folder(saved_folder)) == []


def test_one_process_loads_without_a_group_and_without_pickle(
    saved_folder: Path, saved_by_two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    hostile = pickle.dumps(print)
    (step_folder(saved_folder) / ".metadata").write_bytes(hostile)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    saved: Arrays = saved_by_two["saved"]
    for name, value in whole(
        dict(load_model(step_folder(saved_folder)).named_parameters())
    ).items():
        assert (value == saved[f"model.{name}"]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="checkpoint/2"), "schema"),
        (lambda d: d.update(step=4), "says step 4"),
        (lambda d: d.update(step="3"), "step"),
        (lambda d: d.pop("tensors"), "tensors"),
        (lambda d: d.update(xxh129="0"), "xxh129: Extra inputs"),
        (lambda d: d["state"].update(scale=float("nan")), "state.scale.*finite"),
        (lambda d: d["state"].update(scale=float("-inf")), "state.scale.*finite"),
        (lambda d: d["state"].update(scale="1"), "state.scale"),
        (
            lambda d: d["state"].update(optimizer_steps=3.5),
            "optimizer_steps is 3.5, which is not a count",
        ),
        (
            lambda d: d["state"].update(optimizer_steps=-3),
            "optimizer_steps is -3, which is not a count",
        ),
        (lambda d: d["state"].update(rollbacks=True), "rollbacks is True, which is not a count"),
        (lambda d: d["files"][0].update(path="../rank-00000.bin"), "not a plain file name"),
        (lambda d: d["files"][0].update(path="/etc/hostname"), "not a plain file name"),
        (lambda d: d["files"][0].update(path=".."), "not a plain file name"),
        (lambda d: d["files"][0].update(path="rank-00009.bin"), "missing"),
        (lambda d: d["files"][1].update(bytes=7), "not 7"),
        (lambda d: d["tensors"]["model.final_norm.bias"]["chunks"].pop(), "do not make up"),
        (lambda d: d["tensors"]["model.final_norm.bias"].update(dtype="object"), "unknown dtype"),
        (
            lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(file="../x"),
            "does not fit",
        ),
        (
            lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(start=2**40),
            "does not fit",
        ),
        (lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(start=-64), "start"),
        (
            lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(offsets=[10]),
            "does not fit",
        ),
        (
            lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(sizes=[8]),
            "does not fit",
        ),
        (
            lambda d: d["tensors"]["model.final_norm.bias"]["chunks"][0].update(sizes=[3, 3]),
            "does not fit",
        ),
    ],
)
def test_hostile_manifests(saved_folder: Path, change: Change, words: str) -> None:
    change_manifest(saved_folder, change)
    with pytest.raises(DamagedCheckpoint, match=words):
        open_checkpoint(step_folder(saved_folder))
    assert verify(step_folder(saved_folder), "size")


def boxes(*at: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    """A tensor [4, 6] in these boxes, all of them read from the same place."""
    chunks = [
        {"offsets": o, "sizes": s, "file": "rank-00000.bin", "start": 0, "bytes": 4 * math.prod(s)}
        for o, s in at
    ]
    return {"shape": [4, 6], "dtype": "float32", "chunks": chunks}


@pytest.mark.parametrize(
    ("tensor", "twice"),
    [
        # the second half stays what it was
        (boxes(((0, 0), (2, 6)), ((0, 0), (2, 6))), "[0, 0] and [0, 0]"),
        (boxes(((0, 0), (3, 4)), ((0, 4), (4, 2)), ((2, 0), (1, 4))), "[0, 0] and [2, 0]"),
        (
            boxes(((0, 0), (4, 1)), ((1, 0), (2, 5)), ((3, 0), (1, 5)), ((0, 1), (1, 5))),
            "[0, 0] and [1, 0]",
        ),
        (boxes(((2, 3), (2, 3)), ((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (2, 3))), ""),
        (
            boxes(
                ((0, 0), (1, 6)),
                ((1, 0), (3, 2)),
                ((1, 2), (2, 4)),
                ((3, 2), (1, 4)),
                ((2, 2), (0, 4)),
            ),
            "",
        ),
    ],
)
def test_parts_of_a_tensor_do_not_overlap(
    saved_folder: Path, tensor: dict[str, Any], twice: str
) -> None:
    change_manifest(saved_folder, lambda d: d["tensors"].update(x=tensor))
    found = verify(step_folder(saved_folder), "size")
    assert found == ([f"x: its parts at {twice} overlap"] if twice else [])


@pytest.mark.parametrize(
    ("bit", "apart"),
    [
        (1, 7),
        (64, 11),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(64, 1, marks=pytest.mark.slow),
    ],
)
def test_no_flipped_bit_of_a_manifest_is_overlooked(bit: int, apart: int, tmp_path: Path) -> None:
    """Of every so many-th byte."""
    path = checkpoint_folder(tmp_path, 3) / MANIFEST
    path.parent.mkdir()
    (path.parent / "a.bin").write_bytes(bytes(16))
    tensor = TensorEntry(
        shape=(4,),
        dtype="float32",
        chunks=(TensorChunk(offsets=(0,), sizes=(4,), file="a.bin", start=0, bytes=16),),
    )
    facts: dict[str, Any] = {
        "layout": {"world_size": 1},
        "job": {"name": "tiny"},
        "versions": {"torch": "2"},
        "state": {"optimizer_steps": 3, "scale": 2.0},
    }
    file = DataFile(path="a.bin", bytes=16, xxh128="")
    Manifest(
        step=3,
        consumed_samples=24,
        files=(file,),
        tensors={"model.w": tensor},
        validation={"valid": 1.5},
        **facts,
    ).write(path.parent)
    content = path.read_bytes()
    assert verify(path.parent, "size") == []
    for i in range(0, len(content), apart):
        path.write_bytes(content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :])
        assert verify(path.parent, "size"), content[max(i - 30, 0) : i + 1]


def test_a_manifest_that_was_changed_by_hand_is_told_by_its_hash(saved_folder: Path) -> None:
    path = step_folder(saved_folder) / MANIFEST
    document = json.loads(path.read_text())
    path.write_text(path.read_text().replace('"consumed_samples":24', '"consumed_samples":16'))
    assert verify(step_folder(saved_folder)) == [
        f"{MANIFEST} does not have the hash {document['xxh128']}"
    ]
    # one of an older version has none, nor losses, and is read
    change_manifest(saved_folder, lambda d: d.pop("validation"))
    assert verify(step_folder(saved_folder)) == []
    assert open_checkpoint(step_folder(saved_folder)).manifest.validation == {}


@pytest.mark.parametrize("damage", ["torn", "empty", "no manifest", "truncated", "gone", "symlink"])
def test_damage_is_named_and_passed_over(saved_folder: Path, damage: str) -> None:
    newer = copy_as(saved_folder, 9)
    data, manifest = newer / "rank-00001.bin", newer / MANIFEST
    if damage == "torn":
        manifest.write_bytes(manifest.read_bytes()[:500])
    elif damage == "empty":
        manifest.write_bytes(b"")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "gone":
        data.unlink()
    else:
        data.rename(saved_folder / "elsewhere")
        data.symlink_to(saved_folder / "elsewhere")
    told: list[str] = []
    found = newest_valid(saved_folder, told.append)
    assert found is not None and found.manifest.step == 3
    assert (
        len(told) == 1
        and str(newer) in told[0]
        and (MANIFEST in told[0] or "rank-00001.bin" in told[0])
    )
    shutil.rmtree(step_folder(saved_folder))
    with pytest.raises(TrainkitError, match="none of the 1") as error:
        newest_valid(saved_folder, told.append)
    assert error.value.exit == 16


def test_what_is_unfinished_or_foreign_is_no_checkpoint(tmp_path: Path, saved_folder: Path) -> None:
    assert newest_valid(tmp_path / "none", pytest.fail) is None
    shutil.copytree(step_folder(saved_folder), saved_folder / "step-00000009.tmp")
    (saved_folder / "notes").mkdir()
    found = newest_valid(saved_folder, pytest.fail)
    assert found is not None and found.manifest.step == 3


def test_prune_counts_valid_ones_only(saved_folder: Path) -> None:
    """Above all, a damaged newest one must not cost the newest valid one its life."""
    for step in (5, 7, 100_000_000):
        copy_as(saved_folder, step)
    (copy_as(saved_folder, 200_000_000) / "rank-00000.bin").write_bytes(b"")
    (saved_folder / "step-00000006").mkdir()
    (saved_folder / "step-00000008.tmp").mkdir()
    prune(saved_folder, CheckpointSettings(keep_last=2), newest=100_000_000)
    assert {p.name for p in saved_folder.glob("step-*")} == {
        "step-00000007",
        "step-100000000",
        "step-00000006",
        "step-00000008.tmp",
        "step-200000000",
    }
    prune(saved_folder, CheckpointSettings(keep_last=9), newest=100_000_000)
    assert (saved_folder / "step-00000007").exists()
    prune(saved_folder, CheckpointSettings(keep_last=1), newest=100_000_000)
    assert (
        not (saved_folder / "step-00000007").exists() and (saved_folder / "step-100000000").exists()
    )


@pytest.mark.parametrize("keep_last", [1, 2])
def test_prune_never_takes_what_was_just_saved(saved_folder: Path, keep_last: int) -> None:
    """One bit of step 9 was lost; training went back to 3 and has saved 5."""
    data = copy_as(saved_folder, 9) / "rank-00000.bin"
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    copy_as(saved_folder, 5)
    prune(saved_folder, CheckpointSettings(keep_last=keep_last), newest=5)
    kept = {"step-00000005", "step-00000009"} | ({"step-00000003"} if keep_last == 2 else set())
    assert {p.name for p in saved_folder.glob("step-*")} == kept
    found = newest_valid(saved_folder, lambda words: None)
    assert found is not None and found.manifest.step == 5


def test_only_tensors_are_planned(tmp_path: Path) -> None:
    planner = TensorSavePlanner()
    planner.set_up_planner({"x": {"not": "a tensor"}}, is_coordinator=True)
    with pytest.raises(TypeError, match="x is not a tensor"):
        planner.create_local_plan()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
)
def test_every_dtype_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    source = {"a": torch.arange(21).reshape(3, 7).to(dtype).T, "b": torch.arange(5).to(dtype)}
    writer = DcpWriter(tmp_path, 0)
    write_tensors(source, storage_writer=writer, planner=TensorSavePlanner(), no_dist=True)
    target = {name: torch.zeros_like(value) for name, value in source.items()}
    read_tensors(target, storage_reader=DcpReader(tmp_path, writer.tensors), no_dist=True)
    assert all(torch.equal(target[name], source[name]) for name in source)


def test_only_the_rows_that_are_needed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory that is contiguous, or not, or of another dtype; of a box of columns so many
    rows at a time that memory stays small."""
    source = torch.arange(40 * 6.0).reshape(40, 6)
    (tmp_path / "a.bin").write_bytes(bytes(64) + source.numpy().tobytes())
    chunk = TensorChunk(offsets=(0, 0), sizes=(40, 6), file="a.bin", start=64, bytes=960)
    read: list[int] = []
    whole_read = storage.read_whole

    def noted(file: FileIO, target: torch.Tensor, start: int) -> None:
        read.append(target.nbytes)
        whole_read(file, target, start)

    monkeypatch.setattr(storage, "PIECE", 100)  # four rows
    monkeypatch.setattr(storage, "read_whole", noted)
    targets = [
        torch.zeros(10, 6),
        torch.zeros(6, 10).T,
        torch.zeros(10, 6, dtype=torch.float64),
        torch.zeros(10, 2),
    ]
    with open(tmp_path / "a.bin", "rb", buffering=0) as file:
        for target, first in zip(targets, (0, 0, 0, 3), strict=True):
            columns = target.shape[1]
            storage._read_box(file, chunk, torch.float32, (7, first), (10, columns), target)
            assert torch.equal(target.float(), source[7:17, first : first + columns])
    assert read == [240, *3 * [96, 96, 48]]


def test_a_scalar_is_read_where_it_must_be_converted(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(torch.tensor(3.5).numpy().tobytes())
    target = torch.zeros((), dtype=torch.float64)
    with open(tmp_path / "a.bin", "rb", buffering=0) as file:
        storage._read_box(
            file,
            TensorChunk(offsets=(), sizes=(), file="a.bin", start=0, bytes=4),
            torch.float32,
            (),
            (),
            target,
        )
    assert target.item() == 3.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_large_part_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is heard of, the hash is that of the file, and a file system that takes no hints
    takes the pieces."""

    def refused(*args: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(storage, "PIECE", 1000)
    monkeypatch.setattr(os, "posix_fadvise", refused)
    heard: list[int] = []
    writer = DcpWriter(
        tmp_path, 0, lambda: heard.append((tmp_path / "rank-00000.bin").stat().st_size)
    )
    write_tensors(
        {"a": torch.arange(700.0), "b": torch.arange(3.0)},
        storage_writer=writer,
        planner=TensorSavePlanner(),
        no_dist=True,
    )
    assert heard in ([1000, 2000, 2800, 2816, 2828], [12, 64, 1064, 2064, 2864])
    (file,) = writer.files
    content = (tmp_path / file.path).read_bytes()
    assert (file.bytes, file.xxh128) == (len(content), xxhash.xxh3_128_hexdigest(content))
