"""A run goes on with its own code, whatever version that is of."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from trainkit.launch.programs import PROGRAM_PATHS, ProgramName, program_path


@pytest.mark.parametrize("name", PROGRAM_PATHS)
def test_programs_are_found_in_code_of_any_version(name: ProgramName, tmp_path: Path) -> None:
    package = Path(trainkit.__file__).parent
    today, *before = PROGRAM_PATHS[name]
    assert program_path(package.parent, name) == package / today
    assert (package / today).is_file()
    assert program_path(tmp_path, name) == tmp_path / "trainkit" / today  # nothing is there yet
    for number, place in enumerate(before):
        code = tmp_path / str(number)
        (code / "trainkit" / place).parent.mkdir(parents=True)
        (code / "trainkit" / place).touch()
        assert program_path(code, name) == code / "trainkit" / place
