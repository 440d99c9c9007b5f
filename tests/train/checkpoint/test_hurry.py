"""Told to stop: the checkpoint comes first, and what is deleted keeps nobody waiting, or hides
what ended the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_keeping import save as save_one, steps_in
from trainkit.base.files import remove
from trainkit.base.locks import locked
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs import manifest, retention
from trainkit.runs.checkpoints import LOCK, checkpoint_folder, set_aside
from trainkit.runs.retention import prune
from trainkit.train.checkpoint.manager import CheckpointManager, CheckpointObserver
from trainkit.train.checkpoint.save_load import CheckpointMetadata, writer_lock

pytestmark = pytest.mark.usefixtures("one_rank")

PATIENCE = 30.0  # seconds; what is waited for takes milliseconds


@pytest.fixture
def deletion(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Deleting an old checkpoint takes until this is set."""
    go_on = threading.Event()

    def slow(path: Path) -> None:
        assert go_on.wait(PATIENCE)
        remove(path)

    monkeypatch.setattr(retention, "remove", slow)
    yield go_on
    go_on.set()


def save(saver: CheckpointManager, step: int, *, last: bool = False) -> None:
    saver.save({"model.w": torch.zeros(4, 3)}, CheckpointMetadata(step, 8 * step), last=last)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_stop_does_not_wait_for_a_deletion(
    save_async: bool, tmp_path: Path, deletion: threading.Event
) -> None:
    saver = CheckpointManager(CheckpointSettings(keep_last=1, save_async=save_async), tmp_path)
    save(saver, 1)
    save(saver, 2)
    saver.wait_for_save()
    saver.prepare_to_stop()
    save(saver, 3, last=True)
    saver.close()
    assert (
        not deletion.is_set()
        and steps_in(tmp_path) == [2, 3]
        and len(list(tmp_path.glob("step-00000001.*.tmp"))) == 1
    )
    deletion.set()
    saver.wait_for_purge()
    # after the last save nothing is deleted
    assert not list(tmp_path.glob("*.tmp")) and steps_in(tmp_path) == [2, 3]
    with contextlib.closing(
        CheckpointManager(CheckpointSettings(keep_last=1), tmp_path)
    ) as another:
        save(another, 4)


def test_a_stop_waits_where_there_is_no_room_otherwise(
    tmp_path: Path, deletion: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointManager(CheckpointSettings(keep_last=1), tmp_path)
    save(saver, 1)
    save(saver, 2)
    (tmp_path / "step-00000009.1a2b3c4d.tmp").mkdir()  # of the dead
    saver.prepare_to_stop()
    asked: list[bool] = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(deletion.is_set())
        threading.Timer(0.2, deletion.set).start()
        return SimpleNamespace(f_bavail=1000 * any(asked), f_frsize=1000)

    monkeypatch.setattr(os, "statvfs", statvfs)
    save(saver, 3, last=True)
    assert (
        asked == [False, True] and steps_in(tmp_path) == [2, 3] and not list(tmp_path.glob("*.tmp"))
    )
    saver.wait_for_purge()


@pytest.mark.parametrize("save_async", [False, True])
def test_who_waits_shows_that_it_lives(
    save_async: bool, tmp_path: Path, deletion: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.train.checkpoint.manager.BEAT", 0.05)
    beats: list[str] = []

    class Observer(CheckpointObserver):
        def on_progress(self) -> None:
            beats.append(threading.current_thread().name)
            if len(beats) > 5:
                deletion.set()

    saver = CheckpointManager(
        CheckpointSettings(keep_last=1, save_async=save_async), tmp_path, Observer()
    )
    for step in (1, 2):
        save(saver, step)
        saver.wait_for_save()
    assert not deletion.is_set()
    beats.clear()
    save(saver, 3, last=True)  # it ends because it was heard of again and again
    assert set(beats) == {threading.current_thread().name}
    saver.close()
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("save_async", [False, True])
def test_the_grace_that_is_told_is_enough(
    save_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told in the midst of a save behind training, which takes 0.3 s: that one, and the stop's
    own."""
    publish, slow = manifest.Manifest.write, [0.3]

    def write(self: manifest.Manifest, folder: Path) -> None:
        time.sleep(slow[0])
        publish(self, folder)

    monkeypatch.setattr(manifest.Manifest, "write", write)
    told: list[float] = []

    class Observer(CheckpointObserver):
        def on_saved(self, stop_seconds: float) -> None:
            told.append(stop_seconds)

    saver = CheckpointManager(
        CheckpointSettings(keep_last=9, save_async=save_async), tmp_path, Observer()
    )
    save(saver, 1)
    saver.wait_for_save()
    slow[0] = 0.0
    save(saver, 2, last=True)
    saver.close()
    # the longest so far, not the last
    assert told[0] >= (0.6 if save_async else 0.3) and told[1] >= told[0]


@pytest.mark.parametrize("error", [ValueError("no checkpoint"), OSError("gone")])
def test_closing_raises_nothing_that_a_deletion_met(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*args: Any) -> None:
        raise error

    monkeypatch.setattr("trainkit.train.checkpoint.manager.prune", fails)
    saver = CheckpointManager(CheckpointSettings(keep_last=1), tmp_path)
    save(saver, 1)
    save(saver, 2)
    saver.close()
    assert capsys.readouterr().err.count("could not be deleted: ") == 2


def test_nothing_is_renamed_while_another_publishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = CheckpointManager(CheckpointSettings(keep_last=1), tmp_path)
    save(saver, 1)
    saver.wait_for_purge()
    save_one(tmp_path, 2)
    with locked(tmp_path / LOCK, {"host": "other"}):
        saver._purge_stale(2)
    assert steps_in(tmp_path) == [1, 2] and "'host': 'other'" in capsys.readouterr().err
    saver._purge_stale(2)
    assert steps_in(tmp_path) == [2]


def test_who_wakes_up_late_deletes_nothing_that_others_went_back_to(tmp_path: Path) -> None:
    """Its newest was set aside meanwhile, and training went on from what it is about to delete."""
    for step in (1, 2):
        save_one(tmp_path, step)
    set_aside(checkpoint_folder(tmp_path, 2))
    assert prune(
        tmp_path, CheckpointSettings(keep_last=1), 2, writer_lock(tmp_path)
    ) == [] and steps_in(tmp_path) == [1]
    shutil.rmtree(checkpoint_folder(tmp_path, 1))
