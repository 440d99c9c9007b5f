"""What several tests look at: made once a test run, by the worker of pytest that asks first."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from trainkit.base.locks import locked

Made = TypeVar("Made")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """What `make` returns of a new folder. Tests must leave both as they are: pytest-xdist gives
    those of one file to several workers, and all of them read what the first has made, or how it
    failed."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / f"once-{name}"
    done, failed = root / "made", root / "failed"
    with locked(root / "lock", {}):
        if failed.exists():
            pytest.fail(f"{name} failed in another worker:\n{failed.read_text()}")
        if not done.exists():
            folder = root / "folder"
            folder.mkdir()
            try:
                made = make(folder)
            except BaseException:
                failed.write_text(traceback.format_exc())
                raise
            (root / "made.tmp").write_bytes(pickle.dumps(made))
            (root / "made.tmp").rename(done)
        found: Made = pickle.loads(done.read_bytes())  # our own, of this test run
    return found
