"""A run goes on with its own code, whatever version that is of."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from trainkit.launch.programs import PROGRAM_PATHS, ProgramName, program_path


@pytest.mark.parametrize("name", PROGRAM_PATHS)
def test_programs_are_found_in_code_of_any_version(name: ProgramName, tmp_path: Path) -> None:
    today, before = PROGRAM_PATHS[name]
    assert (
        program_path(Path(trainkit.__file__).parents[1], name)
        == Path(trainkit.__file__).parent / today
    )
    assert (Path(trainkit.__file__).parent / today).is_file()
    assert program_path(tmp_path, name) == tmp_path / "trainkit" / today  # nothing is there yet
    (tmp_path / "trainkit" / before).parent.mkdir(parents=True)
    (tmp_path / "trainkit" / before).touch()
    assert program_path(tmp_path, name) == tmp_path / "trainkit" / before
