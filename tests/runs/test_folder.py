"""Run folders: their ids sort by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.runs.folder import new_run_folder


def test_ids_sort_by_time_within_a_second_too(tmp_path: Path) -> None:
    """`last` is the newest by its id."""
    ids = [new_run_folder(tmp_path, "demo").path.name for _ in range(5)]
    assert ids == sorted(ids) and len(set(ids)) == 5


def test_a_taken_id_is_not_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter(["0001", "0001", "0002", *(f"{number:04x}" for number in range(3, 99))])
    monkeypatch.setattr("trainkit.runs.folder.secrets.token_hex", lambda size: next(random))
    first, second = new_run_folder(tmp_path, "demo"), new_run_folder(tmp_path, "demo")
    assert first.path.name < second.path.name and second.path.is_dir()
