"""What could not be read may be whole: it is looked at again, and passed over at most, never
renamed. What was read and is wrong is set aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_keeping import flip, save, steps_in
from trainkit.base.errors import TrainkitError
from trainkit.base.locks import locked
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs import checkpoints, manifest, retention
from trainkit.runs.checkpoints import (
    LOCK,
    SET_ASIDE_SUFFIX,
    NewerCheckpoint,
    UnreadableCheckpoint,
    checkpoint_folder,
    newest_valid,
    set_aside_in,
    verify,
)
from trainkit.runs.manifest import MANIFEST
from trainkit.runs.retention import pin
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.manager import CheckpointManager
from trainkit.train.checkpoint.newest import newest_valid_together
from trainkit.train.checkpoint.save_load import CheckpointMetadata

pytestmark = pytest.mark.usefixtures("one_rank")


def two(folder: Path) -> Path:
    """Two checkpoints; returns the newest."""
    for step in (1, 2):
        save(folder, step)
    return checkpoint_folder(folder, 2)


def found(folder: Path, how: Any = "full") -> tuple[int, list[str]]:
    """The step that is gone on from, and what was told."""
    told: list[str] = []
    newest = newest_valid_together(folder, how, told.append)
    assert newest is not None
    return newest.manifest.step, told


def refuse(
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    code: int,
    times: int,
    where: Callable[[Path], bool] = lambda path: True,
) -> list[Path]:
    """The first so many reads of files there fail; returns those that did."""
    failed: list[Path] = []
    owner: Any = {"hash": checkpoints, "manifest": Path, "size": Path}[what]
    name = {"hash": "_xxh128", "manifest": "read_bytes", "size": "stat"}[what]
    real = getattr(owner, name)

    def fails(path: Path, *args: Any, **kwargs: Any) -> Any:
        if len(failed) < times and path.suffix in (".bin", ".json") and where(path):
            failed.append(path)
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    return failed


@pytest.mark.parametrize(
    "code",
    [errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ENOENT],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("what", ["hash", "manifest", "size"])
def test_an_error_that_passes_costs_nothing(
    what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path)
    failed = refuse(monkeypatch, what, code, 2)
    assert found(tmp_path) == (2, []) and len(failed) == 2 and not set_aside_in(tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["hash", "manifest", "size"])
def test_a_bad_sector_of_the_newest_is_passed_over_and_keeps_its_name(
    what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = two(tmp_path)
    with monkeypatch.context() as broken:
        failed = refuse(broken, what, code, 10**6, lambda path: path.parent == newest)
        step, (words,) = found(tmp_path)
    assert step == 1 and len(failed) >= 3 and not set_aside_in(tmp_path)
    assert (
        words.startswith("passed over: ")
        and f"cannot be read on {os.uname().nodename}" in words
        and f"({errno.errorcode[code]})" in words
    )
    assert found(tmp_path) == (2, [])  # it was whole all the time


def test_where_no_way_leads_to_any_the_run_ends_and_all_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that cannot be read are no two bad sectors: rather no training than training that goes
    back by days."""
    two(tmp_path)
    save(tmp_path, 3)
    with monkeypatch.context() as broken:
        refuse(
            broken,
            "hash",
            errno.EMFILE,
            10**6,
            lambda path: path.parent != checkpoint_folder(tmp_path, 1),
        )
        with pytest.raises(
            UnreadableCheckpoint, match=r"rank 0: rank-00000.bin cannot be read on .* \(EMFILE\)"
        ) as error:
            found(tmp_path)
        assert error.value.exit == 10 and "`resume` once more" in error.value.hint
    assert found(tmp_path) == (3, []) and steps_in(tmp_path) == [1, 2, 3]


def test_one_that_cannot_be_read_among_damaged_ones_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 10, not 16: it may be whole."""
    flip(two(tmp_path))
    refuse(
        monkeypatch,
        "hash",
        errno.EIO,
        10**6,
        lambda path: path.parent == checkpoint_folder(tmp_path, 1),
    )
    with pytest.raises(UnreadableCheckpoint) as error:
        found(tmp_path)
    assert error.value.exit == 10 and not set_aside_in(tmp_path)
    with pytest.raises(UnreadableCheckpoint):
        newest_valid(tmp_path, lambda words: None)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.bin"])
def test_a_file_that_is_listed_and_not_shown_is_not_taken_for_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, listdir = two(tmp_path), os.listdir
    (newest / name).unlink()
    with monkeypatch.context() as lagging:
        lagging.setattr(
            os,
            "listdir",
            lambda folder: [*listdir(folder), *([name] if Path(folder) == newest else [])],
        )
        step, (words,) = found(tmp_path)
        assert (
            step == 1
            and f"{name} cannot be read" in words
            and "listed" in words
            and not set_aside_in(tmp_path)
        )
    step, (words, renamed) = found(tmp_path)  # now the list says so too
    assert step == 1 and name in words and "is now step-00000002." in renamed


def test_an_old_size_is_asked_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, stat = two(tmp_path), Path.stat

    def old(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        seen = stat(self, follow_symlinks=follow_symlinks)
        return (
            os.stat_result([*seen[:6], 0, *seen[7:10]])
            if self == newest / "rank-00000.bin"
            else seen
        )

    monkeypatch.setattr(Path, "stat", old)
    assert found(tmp_path) == (2, [])


def test_a_pinned_one_and_a_link_keep_their_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flip(two(run))
    pin(run, 2, pinned=True)
    save(tmp_path, 3)
    flip(checkpoint_folder(tmp_path, 3))
    checkpoint_folder(run, 3).symlink_to(checkpoint_folder(tmp_path, 3))
    step, told = found(run)
    assert (
        step == 1
        and len(told) == 2
        and not set_aside_in(run)
        and checkpoint_folder(run, 3).is_symlink()
    )


def test_nothing_is_set_aside_under_a_writer(tmp_path: Path) -> None:
    flip(two(tmp_path))
    with locked(tmp_path / LOCK, {"host": "other"}):
        step, (_, words) = found(tmp_path)
    assert (
        step == 1
        and not set_aside_in(tmp_path)
        and "stay under their names" in words
        and "'host': 'other'" in words
    )


def test_what_another_writer_has_put_there_since_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(two(tmp_path))
    real = locked

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(checkpoint, "locked", real)
        save(tmp_path, 2)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "locked", late)
    assert found(tmp_path)[0] == 1
    # by that save
    assert verify(checkpoint_folder(tmp_path, 2)) == [] and len(set_aside_in(tmp_path)) == 1


def test_the_step_that_was_passed_over_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It turns out to be whole in the end; no other process wrote it."""
    newest = two(tmp_path)
    saver = CheckpointManager(CheckpointSettings(keep_last=9), tmp_path)
    with monkeypatch.context() as broken:
        refuse(broken, "hash", errno.EIO, 10**6, lambda path: path.parent == newest)
        chosen = saver.newest()
        assert chosen is not None and chosen.manifest.step == 1
    tensors = {"model.w": torch.zeros(3)}
    saver.save(tensors, CheckpointMetadata(2, consumed_samples=16), last=True)
    saver.close()
    (aside,) = set_aside_in(tmp_path)
    assert (
        steps_in(tmp_path) == [1, 2]
        and aside.name.endswith(SET_ASIDE_SUFFIX)
        and (aside / MANIFEST).is_file()
    )


@pytest.mark.parametrize("change", ["field", "nested", "schema"])
def test_a_newer_versions_checkpoint_is_refused_and_stays(change: str, tmp_path: Path) -> None:
    path = two(tmp_path) / MANIFEST
    text = path.read_text()[: -len(manifest._seal(b""))]
    old, new = {
        "field": ('"step":2', '"step":2,"new":1'),
        "nested": ('"shape":', '"new":1,"shape":'),
        "schema": ("checkpoint/1", "checkpoint/2"),
    }[change]
    body = text.replace(old, new)
    path.write_text(body + manifest._seal(body.encode()))
    with pytest.raises(
        NewerCheckpoint, match=r"is whole, and has a form that trainkit .* does not know"
    ) as error:
        found(tmp_path)
    assert (
        error.value.exit == 3
        and "the version that wrote it" in error.value.hint
        and not set_aside_in(tmp_path)
    )
    with pytest.raises(TrainkitError, match="does not know"):
        newest_valid(tmp_path, pytest.fail)
    assert retention.prune(tmp_path, CheckpointSettings(keep_last=1), 1) == [] and path.exists()
    # the hash of something else: it is only damaged
    path.write_text(body + manifest._seal(text.encode()))
    assert found(tmp_path)[0] == 1 and len(set_aside_in(tmp_path)) == 1
