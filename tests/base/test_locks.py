"""Locks whose file their holder removes; and who may take one."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o027, 0o600), (0o002, 0o660)])
def test_who_may_not_write_to_a_lock_cannot_take_it(tmp_path: Path, umask: int, mode: int) -> None:
    """Reading is enough for flock(2)."""
    made, found = tmp_path / "made.lock", tmp_path / "found.lock"
    before = os.umask(umask)
    try:
        found.touch(0o666)  # as an older trainkit made it
        for path in (made, found):
            with locked(path, {}):
                assert path.stat().st_mode & 0o666 == mode
    finally:
        os.umask(before)
