"""A checkpoint that several tests look at, written once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.once import once


@pytest.fixture(scope="session")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `train_and_save` returns on rank 0 of two."""
    return once(tmp_path_factory, "saved-by-two", _save)


def _save(root: Path) -> dict[str, Any]:
    rank_0: dict[str, Any] = run_ranks(2, "tests.train.support:train_and_save", root)[0]
    return rank_0


@pytest.fixture
def saved_folder(saved_by_two: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the folder of checkpoints that two ranks wrote."""
    return Path(shutil.copytree(saved_by_two["folder"].parent, tmp_path / "checkpoints"))
