"""What several tests of the launch use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.recorded_slurm import Slurm, make_slurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Slurm's programs, recorded."""
    return make_slurm(tmp_path, monkeypatch)
