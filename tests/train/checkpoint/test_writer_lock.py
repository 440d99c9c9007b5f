"""Who may write checkpoints: two writers at once, one after the other, without a lock, and what
becomes of the lock file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_keeping import save, steps_in
from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy, locked
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import LOCK, checkpoint_folder, open_checkpoint, verify
from trainkit.runs.manifest import Manifest
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.manager import CheckpointManager
from trainkit.train.checkpoint.save_load import NotSaved

pytestmark = pytest.mark.usefixtures("one_rank")


def test_two_writers_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        locked(tmp_path / LOCK, {"host": "other"}),
        pytest.raises(NotSaved, match="'host': 'other'"),
    ):
        save(tmp_path, 2)
    assert steps_in(tmp_path) == [1] and save(tmp_path, 2).manifest.step == 2


def test_two_writers_one_after_the_other(tmp_path: Path) -> None:
    """The other's checkpoint of the same step is whole: it is not overwritten."""
    save(tmp_path, 3, value=1.0)
    with pytest.raises(TrainkitError, match="written by another process") as error:
        save(tmp_path, 3, value=2.0)
    assert (
        error.value.exit == 17
        and verify(checkpoint_folder(tmp_path, 3)) == []
        and not list(tmp_path.glob("*.tmp"))
    )
    # now it is in the way, and worth nothing
    (checkpoint_folder(tmp_path, 3) / "rank-00000.bin").write_bytes(b"torn")
    save(tmp_path, 3, value=2.0)
    assert verify(checkpoint_folder(tmp_path, 3)) == []


def test_a_full_disk_has_no_room_for_the_holders_words_and_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with (
        locked(tmp_path / LOCK, {"host": "a"}),
        pytest.raises(LockBusy),
        locked(tmp_path / LOCK, {"host": "b"}, wait=False),
    ):
        pass


def test_two_writers_without_a_lock_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system's locks do not reach the other host. The first was stopped before it
    published, the second takes it for dead."""
    monkeypatch.setattr(checkpoint, "locked", lambda *args, **kwargs: contextlib.nullcontext())
    publish = checkpoint._publish

    def late(temporary: Path, target: Path, manifest: Manifest, *args: Any) -> None:
        monkeypatch.setattr(checkpoint, "_publish", publish)
        save(tmp_path, 5, value=2.0)
        publish(temporary, target, manifest, *args)

    monkeypatch.setattr(checkpoint, "_publish", late)
    with pytest.raises(NotSaved, match=r"rank-00000\.bin is missing"):
        save(tmp_path, 5, value=1.0)
    assert verify(checkpoint_folder(tmp_path, 5)) == [] and not list(tmp_path.glob("*.tmp"))
    target = torch.zeros(50, 3)
    checkpoint.load(
        open_checkpoint(checkpoint_folder(tmp_path, 5)),
        {"model.w": target, "model.b": torch.zeros(3)},
    )
    assert (target == 2.0).all()


def test_no_save_uses_anothers_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    prepare = checkpoint._prepare

    def noted(folder: Path, temporary: Path) -> None:
        names.append(temporary.name)
        prepare(folder, temporary)

    monkeypatch.setattr(checkpoint, "_prepare", noted)
    for folder in ("a", "b"):
        save(tmp_path / folder, 5)
    assert len(set(names)) == 2 and all(
        re.fullmatch(r"step-00000005\.[0-9a-f]{8}\.tmp", name) for name in names
    )


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_before_the_first_step(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(TrainkitError, match=f"cannot lock files: {os.strerror(error)}") as told:
        CheckpointManager(CheckpointSettings(), tmp_path / "checkpoints")
    assert (
        told.value.exit == 3
        and str(tmp_path) in told.value.message
        and "-o flock" in told.value.hint
    )


def test_a_saver_begins_beside_a_writer(tmp_path: Path) -> None:
    """The last attempt may still publish: that is not an error before the first save."""
    with locked(tmp_path / LOCK, {"host": "other"}):
        CheckpointManager(CheckpointSettings(), tmp_path)


def test_what_becomes_of_the_lock_file_afterwards_is_of_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was published: an error then would be rank 0's alone, and all others would
    wait for it."""
    real, calls = os.ftruncate, []

    def stale(handle: int, length: int) -> None:
        calls.append(handle)
        if len(calls) == 2:  # at letting go
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        real(handle, length)

    monkeypatch.setattr(os, "ftruncate", stale)
    assert save(tmp_path, 1).manifest.step == 1 and len(calls) == 2
    assert save(tmp_path, 2).manifest.step == 2
