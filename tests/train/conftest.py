"""Worlds that several tests look at, each spawned once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By world size, what `first_step_then_save` returns on every rank. 1 and 4 ranks load what
    2 have saved."""
    target = "tests.train.support:first_step_then_save"
    two = run_ranks(2, target, tmp_path_factory.mktemp("two"), None)
    return {
        2: two,
        **{
            size: run_ranks(size, target, tmp_path_factory.mktemp(f"world{size}"), two[0]["folder"])
            for size in (1, 4)
        },
    }


@pytest.fixture
def saved_folder(worlds: dict[int, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the folder of checkpoints that two ranks wrote."""
    return Path(shutil.copytree(worlds[2][0]["folder"].parent, tmp_path / "checkpoints"))
