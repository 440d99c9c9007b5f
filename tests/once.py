"""What several tests look at: made once a test run, by the worker of pytest that asks first."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from trainkit.base.locks import locked

Made = TypeVar("Made")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """What `make` returns of a new folder. Tests must leave both as they are: pytest-xdist gives
    those of one file to several workers, and all of them read what the first has made."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / f"once-{name}"
    done = root / "made"
    with locked(root / "lock", {}):
        if not done.exists():
            folder = root / "folder"
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            made = make(folder)
            (root / "made.tmp").write_bytes(pickle.dumps(made))
            (root / "made.tmp").rename(done)
        found: Made = pickle.loads(done.read_bytes())  # our own, of this test run
    return found
