"""Which checkpoints stay, which are looked at how closely, who may write, and that a hostile one
executes nothing."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import locked
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import (
    LOCK,
    Checkpoint,
    checkpoint_folder,
    files_to_hash,
    newest_valid,
    open_checkpoint,
    set_aside_in,
    step_of,
    verify,
)
from trainkit.runs.manifest import MANIFEST, DataFile, Manifest
from trainkit.runs.retention import pin, prune, retention_reasons, valid_by_size
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.dcp_storage import DcpReader, TensorLoadPlanner
from trainkit.train.checkpoint.newest import newest_valid_together
from trainkit.train.checkpoint.save_load import CheckpointMetadata, NotSaved
from trainkit.train.checkpoint.staging import StagingBuffers
from trainkit.train.parallel.shards import Shards

pytestmark = pytest.mark.usefixtures("one_rank")


def save(
    folder: Path, step: int, *, loss: float | None = None, value: float = 1.0, **about: Any
) -> Checkpoint:
    measured = {} if loss is None else {"valid": loss}
    tensors = {"model.w": torch.full((50, 3), value), "model.b": torch.arange(3.0)}
    metadata = CheckpointMetadata(step, 8 * step, validation=measured, **about)
    return checkpoint.save(folder, tensors, metadata)


def steps_in(folder: Path) -> list[int]:
    return [c.manifest.step for c in valid_by_size(folder)]


def test_why_each_stays(tmp_path: Path) -> None:
    losses = {2: 3.0, 4: 1.5, 6: None, 8: 2.0, 10: 1.75, 12: None, 14: 2.5}
    for step, loss in losses.items():
        save(tmp_path, step, loss=loss)
    pin(tmp_path, 8, pinned=True)
    keep = CheckpointSettings(keep_last=2, keep_every=6, keep_best=2)
    told = {
        2: [],
        4: ["validation loss 1.5000"],
        6: ["every 6"],
        8: ["pinned"],
        10: ["newest 2", "validation loss 1.7500"],
    }
    assert retention_reasons(valid_by_size(tmp_path), keep, 12) == told | {
        12: ["newest 2", "every 6"],
        14: ["after step 12"],
    }
    assert prune(tmp_path, keep, 12) == [2] and steps_in(tmp_path) == [4, 6, 8, 10, 12, 14]
    pin(tmp_path, 8, pinned=False)
    assert prune(tmp_path, CheckpointSettings(keep_last=1), 14) == [4, 6, 8, 10, 12] and steps_in(
        tmp_path
    ) == [14]


def test_what_was_pinned_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    rename = Path.rename

    def pinned_meanwhile(self: Path, target: Path) -> Path:
        if self.name == "step-00000001":
            pin(tmp_path, 1, pinned=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", pinned_meanwhile)
    assert prune(tmp_path, CheckpointSettings(keep_last=1), 2) == [] and steps_in(tmp_path) == [
        1,
        2,
    ]


def test_one_that_cannot_be_looked_at_does_not_end_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    stat = Path.stat

    def fails(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.name == "rank-00000.bin" and self.parent.name == "step-00000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return stat(self, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", fails)
        assert prune(tmp_path, CheckpointSettings(keep_last=1), 3) == [2]
    assert steps_in(tmp_path) == [1, 3]


def test_one_that_cannot_be_deleted_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "step-00000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="step-00000001"):
        prune(tmp_path, CheckpointSettings(keep_last=1), 3)
    assert steps_in(tmp_path) == [1, 3]


def test_how_closely_is_looked() -> None:
    files = tuple(DataFile(path=f"rank-{i:05d}.bin", bytes=1, xxh128="") for i in range(20))
    manifest = Manifest(
        step=7,
        consumed_samples=0,
        files=files,
        tensors={},
        layout={},
        job={},
        versions={},
        state={},
    )
    assert files_to_hash(manifest, "full") == list(files) and files_to_hash(manifest, "size") == []
    some = files_to_hash(manifest, "sample")
    assert len(some) == 3 and some == files_to_hash(manifest, "sample") != files_to_hash(
        manifest.model_copy(update={"step": 8}), "sample"
    )


@pytest.mark.parametrize("how", ["size", "sample", "full"])
def test_a_flipped_bit_is_found_where_hashes_are_compared(how: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    data = checkpoint_folder(tmp_path, 2) / "rank-00000.bin"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    found = newest_valid_together(tmp_path, how, print)
    assert found is not None and found.manifest.step == (2 if how == "size" else 1)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"state": {"optimizer_steps": -1}}, "state.optimizer_steps is -1, which is not a count"),
        (
            {"state": {"hysteresis_tracker": 0.5}},
            "state.hysteresis_tracker is 0.5, which is not a whole number",
        ),
        ({"job": {"name": "\ud800"}}, "manifest.json: .*JSON"),
    ],
)
def test_what_no_resume_would_take_is_not_published(
    about: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A checkpoint is read back by the reader's own checks before it gets its name."""
    save(tmp_path, 1)
    with pytest.raises(
        TrainkitError,
        match=f"(?s)step-00000002 was not published, for no resume would take it: .*{words}",
    ) as error:
        save(tmp_path, 2, **about)
    assert (
        error.value.exit == 2
        and not isinstance(error.value, NotSaved)
        and "report it" in error.value.hint
    )
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"] and steps_in(
        tmp_path
    ) == [1]


@pytest.mark.parametrize("spoil", ["flip", "cut", "remove"])
def test_a_manifest_that_the_disk_gives_back_otherwise_is_not_published(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Manifest.write

    def write(self: Manifest, folder: Path) -> None:
        real(self, folder)
        content = (folder / MANIFEST).read_bytes()
        (folder / MANIFEST).write_bytes(
            bytes([content[0] ^ 1]) + content[1:] if spoil == "flip" else content[:-9]
        )
        if spoil == "remove":
            (folder / MANIFEST).unlink()

    save(tmp_path, 1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            NotSaved, match=r"have changed since they were written: manifest\.json reads otherwise"
        ),
    ):
        patch.setattr(Manifest, "write", write)
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"]
    assert save(tmp_path, 2).manifest.step == 2


def test_chances_of_the_loss_scale_go_on_below_nought(tmp_path: Path) -> None:
    """Megatron-LM's rule: each overflow takes one, and only growth of the scale brings them
    back."""
    save(tmp_path, 4, state={"scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": -12})
    found = newest_valid(tmp_path, pytest.fail)
    assert found is not None and found.manifest.state["hysteresis_tracker"] == -12


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_checkpoint_that_is_a_link_costs_no_save(step: int, tmp_path: Path) -> None:
    """A run seeded from elsewhere: the link goes, what it leads to stays."""
    seed = save(tmp_path / "elsewhere", 1).folder
    run = tmp_path / "run"
    run.mkdir()
    checkpoint_folder(run, 1).symlink_to(seed)
    (run / "step-00000007.tmp").write_text("a file")
    for stale in (1, 6):  # what others left unfinished
        (run / f"step-0000000{stale}.tmp").mkdir()
        (run / f"step-0000000{stale}.tmp/rank-00000.bin").write_bytes(b"half")
    (run / "step-00000008.tmp").symlink_to(seed)
    (run / "step-00000009.tmp").symlink_to(run / "nowhere")
    found = newest_valid(run, pytest.fail)
    assert found is not None and found.manifest.step == 1
    if step == 1:  # in the way, and no longer whole
        (seed / MANIFEST).unlink()
    for n in (step, step + 1):
        save(run, n)
    assert prune(run, CheckpointSettings(keep_last=1), step + 1) in ([1], [1, 2], [1, 3], [2])
    save(run, step + 2)
    assert steps_in(run) == [step + 1, step + 2] and not list(run.glob("*.tmp"))
    assert (seed / "rank-00000.bin").is_file()


def test_links_that_lead_nowhere_and_files_in_the_way_go(tmp_path: Path) -> None:
    checkpoint_folder(tmp_path, 1).symlink_to(tmp_path / "nowhere")
    checkpoint_folder(tmp_path, 2).write_text("no folder")
    for step in (1, 2):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [1, 2]


def test_what_cannot_be_deleted_is_told_and_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    stale = tmp_path / "step-00000002.tmp"
    stale.mkdir()
    monkeypatch.setattr(checkpoint, "remove", busy)
    save(tmp_path, 2)
    assert (
        steps_in(tmp_path) == [2]
        and stale.exists()
        and f"WARNING: {stale}" in capsys.readouterr().err
    )


def flip(folder: Path) -> None:
    """Sizes stay right."""
    data = folder / "rank-00000.bin"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])


def test_what_was_passed_over_pushes_out_nothing_whole(tmp_path: Path) -> None:
    """Step 8 was saved before a stop and is rotten; its sizes are right. Training goes on from
    6, and 9 is saved: the newest two are 6 and 9."""
    for step in (6, 8):
        save(tmp_path, step, loss=1.0 / step)
    flip(checkpoint_folder(tmp_path, 8))
    told: list[str] = []
    found = newest_valid_together(tmp_path, "full", told.append)
    assert found is not None and found.manifest.step == 6
    (tmp_path / "step-x.damaged").mkdir()  # not ours
    (aside,) = set_aside_in(tmp_path)
    assert step_of(aside) == 8 and f"is now {aside.name}" in told[1] and "passed over: " in told[0]
    save(tmp_path, 9)
    assert prune(tmp_path, CheckpointSettings(keep_last=2, keep_best=1), 9) == [] and steps_in(
        tmp_path
    ) == [6, 9]
    assert (aside / MANIFEST).is_file()
    save(tmp_path, 10)  # which deletes what is unfinished, not what is damaged
    assert aside.exists()


def test_where_none_is_whole_nothing_is_set_aside(tmp_path: Path) -> None:
    """Else the next `resume` would find none at all, and begin anew."""
    for step in (6, 8):
        save(tmp_path, step)
        flip(checkpoint_folder(tmp_path, step))
    for _ in range(2):
        with pytest.raises(TrainkitError, match="none of the 2 checkpoints"):
            newest_valid_together(tmp_path, "full", print)


def test_what_is_damaged_stays_where_publishing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was all there was of that step: a person may mend it."""
    save(tmp_path, 3)
    flip(checkpoint_folder(tmp_path, 3))
    rotten = (checkpoint_folder(tmp_path, 3) / "rank-00000.bin").read_bytes()

    def fails(temporary: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "publish_folder", fails)
        with pytest.raises(NotSaved, match="Input/output error"):
            save(tmp_path, 3, value=2.0)
    (aside,) = set_aside_in(tmp_path)
    assert (aside / "rank-00000.bin").read_bytes() == rotten
    save(tmp_path, 3, value=2.0)
    assert verify(checkpoint_folder(tmp_path, 3)) == [] and aside.exists()


def test_a_pipe_in_the_manifests_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (checkpoint_folder(tmp_path, 2) / MANIFEST).unlink()
    os.mkfifo(checkpoint_folder(tmp_path, 2) / MANIFEST)
    assert verify(checkpoint_folder(tmp_path, 2)) == [f"{MANIFEST} is not a file"]
    found = newest_valid_together(tmp_path, "full", print)
    assert found is not None and found.manifest.step == 1


def test_an_evaluation_made_later_is_written_down(tmp_path: Path) -> None:
    """But not into what lies behind a link: it is another run's."""
    save(tmp_path / "run", 4)
    checkpoint.note_evaluation(tmp_path / "run", 4, {"valid": 1.5})
    manifest = open_checkpoint(checkpoint_folder(tmp_path / "run", 4)).manifest
    assert (manifest.validation, manifest.state) == (
        {"valid": 1.5},
        {"evaluation_due": False},
    ) and verify(checkpoint_folder(tmp_path / "run", 4)) == []
    checkpoint_folder(tmp_path, 4).symlink_to(checkpoint_folder(tmp_path / "run", 4))
    checkpoint.note_evaluation(tmp_path, 4, {"valid": 2.5})
    assert open_checkpoint(checkpoint_folder(tmp_path, 4)).manifest.validation == {"valid": 1.5}
    with (
        locked(tmp_path / LOCK, {"host": "other"}),
        pytest.raises(NotSaved, match="'host': 'other'"),
    ):
        checkpoint.note_evaluation(tmp_path, 4, {})


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_hostile_checkpoint_executes_nothing(tmp_path: Path) -> None:
    """Pickles wherever bytes can be: as DCP's metadata, as a data file with the right hash, as a
    tensor's name and dtype."""
    mark, folder = tmp_path / "executed", checkpoint_folder(tmp_path / "run", 1)
    evil = pickle.dumps(Hostile(mark))
    with pytest.raises(FileExistsError):  # it works where it is let
        pickle.loads(evil), pickle.loads(evil)
    mark.rmdir()
    save(tmp_path / "run", 1)
    data = evil.ljust((folder / "rank-00000.bin").stat().st_size, b"\0")
    (folder / "rank-00000.bin").write_bytes(data)
    (folder / ".metadata").write_bytes(evil)
    (folder / "optimizer.pt").write_bytes(evil)
    document = json.loads((folder / MANIFEST).read_text())
    document["files"][0]["xxh128"] = xxhash.xxh3_128_hexdigest(data)
    del document["xxh128"]  # as of an older version
    (folder / MANIFEST).write_text(json.dumps(document))
    found = newest_valid(tmp_path / "run", pytest.fail)
    assert found is not None
    tensors = {"model.w": torch.zeros(50, 3), "model.b": torch.zeros(3)}
    checkpoint.load(found, tensors)
    first = tensors[
        "model.w" if found.manifest.tensors["model.w"].chunks[0].start == 0 else "model.b"
    ]
    assert first.flatten()[:3].numpy().tobytes() == data[:12]  # bytes are bytes
    nothing = torch.Size([0])
    # what DCP would unpickle
    item = ReadItem(
        LoadItemType.BYTE_IO,
        MetadataIndex("evil"),
        nothing,
        MetadataIndex("evil"),
        nothing,
        nothing,
    )
    with pytest.raises(TypeError, match="evil is not a tensor"):
        DcpReader(folder, found.manifest.tensors).read_data(LoadPlan([item]), TensorLoadPlanner())
    with pytest.raises(TypeError, match="evil is not a tensor"):
        TensorLoadPlanner().load_bytes(item, io.BytesIO(evil))
    document["tensors"]["model.w"]["dtype"] = evil.decode("latin-1")
    (folder / MANIFEST).write_text(json.dumps(document))
    assert "unknown dtype" in verify(folder)[0]
    (folder / MANIFEST).write_bytes(evil)
    assert MANIFEST in verify(folder)[0]
    assert not mark.exists()


def test_staged_copies_are_copies_in_the_same_room() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    tensors = {
        "a": torch.ones(3),
        "b": Shards({(0, 0): whole[:2], (3, 0): whole[3:]}, (4, 3), torch.float32),
    }
    staging = StagingBuffers()
    first = staging.stage(tensors)
    staging.wait_for_staging()
    rooms = [first["a"].data_ptr(), *(part.data_ptr() for part in first["b"].parts.values())]  # type: ignore[attr-defined]
    whole.add_(1)
    assert first["b"].parts[3, 0].tolist() == [[9.0, 10.0, 11.0]]  # type: ignore[attr-defined]
    second = staging.stage(tensors)
    staging.wait_for_copies()
    assert rooms == [
        second["a"].data_ptr(),
        *(part.data_ptr() for part in second["b"].parts.values()),  # type: ignore[attr-defined]
    ]
    assert second["b"].parts[3, 0].tolist() == [[10.0, 11.0, 12.0]] and staging.bytes == 4 * (3 + 9)  # type: ignore[attr-defined]


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


def test_the_thread_that_saves_waits_on_the_gpu_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And makes nothing on GPU 0, where a thread begins."""
    device = torch.device("cuda", 3)
    called: list[object] = []

    def entered(on: object) -> contextlib.nullcontext[None]:
        called.append(on)
        return contextlib.nullcontext()

    event = Mock(device=device, synchronize=lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", entered)
    staging = StagingBuffers()
    monkeypatch.setattr(staging, "_room_for", lambda name, at, part: torch.empty(3))
    staging.stage({"a": torch.ones(3).as_subclass(OnGpu)})
    staging.wait_for_copies()
    assert called == [device, "synchronize"]


def test_a_file_that_cannot_be_read_is_an_error_not_a_crash(tmp_path: Path) -> None:
    found = save(tmp_path, 1)
    (found.folder / "rank-00000.bin").write_bytes(b"short")  # after it was looked at
    with pytest.raises(TrainkitError, match=r"rank 0 could not read .*rank-00000.bin") as error:
        checkpoint.load(found, {"model.w": torch.zeros(50, 3), "model.b": torch.zeros(3)})
    assert error.value.exit == 10
