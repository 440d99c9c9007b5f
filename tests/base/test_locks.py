"""Locks whose file their holder removes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainkit.base.locks import LockBusy, locked


def test_who_waited_for_a_removed_file_locks_the_one_that_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    waits, holds, leave = (threading.Event() for _ in range(3))

    def second() -> None:
        with locked(path, {}, remove=True, on_wait=lambda holder: waits.set()):
            holds.set()
            leave.wait()

    thread = threading.Thread(target=second, daemon=True)
    with locked(path, {"who": "first"}, remove=True):
        thread.start()
        waits.wait()
    holds.wait()
    with pytest.raises(LockBusy), locked(path, {}, wait=False):
        pass
    leave.set()
    thread.join()
    assert not path.exists()


def test_a_block_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), locked(tmp_path / "x.lock", {}, remove=True):
        raise ValueError("no")
    assert not list(tmp_path.iterdir())
