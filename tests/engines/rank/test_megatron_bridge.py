"""Which of Megatron-Bridge's checkpoints it would not load for want of its own two files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainkit.engines.rank import megatron_bridge


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "iter_0000003"
    place.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (place / "run_config.yaml").write_text("model:\n  seq_length: 64\n")
    torch.save({"step": torch.tensor(3)}, place / "train_state.pt")
    return place


def own_problems(place: Path) -> list[str]:
    (found,) = megatron_bridge.found_checkpoints(place.parent)
    assert found.step == 3
    return [said for said in found.problems if "run_config" in said or "train_state" in said]


def test_a_whole_one_has_both(place: Path) -> None:
    assert own_problems(place) == []


@pytest.mark.parametrize("name", ["run_config.yaml", "train_state.pt"])
@pytest.mark.parametrize("cut", [None, 0, 10])
def test_one_without_or_cut_short_is_damaged(place: Path, name: str, cut: int | None) -> None:
    """It was killed between the tracker and the end of the save."""
    path = place / name
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])
    (said,) = own_problems(place)
    assert name in said


def test_no_tracker_counts(place: Path) -> None:
    """They are written before the save is whole, and one may be empty."""
    (place.parent / "latest_checkpointed_iteration.txt").write_text("")
    assert own_problems(place) == []
    (found,) = megatron_bridge.found_checkpoints(place.parent)
    assert not any("latest" in said for said in found.problems)
