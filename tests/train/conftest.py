"""Worlds that several tests look at, each spawned once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.once import once


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By world size, what `first_step_then_save` returns on every rank. 1 and 4 ranks load what
    2 have saved."""
    return once(tmp_path_factory, "worlds", _worlds)


def _worlds(root: Path) -> dict[int, list[dict[str, Any]]]:
    target = "tests.train.support:first_step_then_save"
    two = run_ranks(2, target, root / "2", None)
    others = {size: run_ranks(size, target, root / str(size), two[0]["folder"]) for size in (1, 4)}
    return {2: two, **others}


@pytest.fixture
def saved_folder(worlds: dict[int, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the folder of checkpoints that two ranks wrote."""
    return Path(shutil.copytree(worlds[2][0]["folder"].parent, tmp_path / "checkpoints"))
