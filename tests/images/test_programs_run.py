"""Programs that build and import: what they say, how they end, what goes with them."""

from __future__ import annotations

import sys

import pytest

from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.contract import Argv
from trainkit.images.programs import read_program, run_program

SECRET = "https://me:word@host/x"


def python(code: str, *more: str) -> Argv:
    return (sys.executable, "-c", code, *more)


def test_what_is_said_beside_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(' told '); print('beside', sys.argv[1], file=sys.stderr)"
    assert read_program(python(code, SECRET)) == "told"
    logged = capfd.readouterr().err
    assert "\nbeside https://" in logged and "\n told" not in logged
    assert "word" not in logged, "no password of a command line or an answer is in a log"


def test_lines_come_as_they_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    code = "import os, sys; print(os.environ['A']); print('b', sys.argv[1], file=sys.stderr)"
    run_program(python(code, SECRET), on_line=lines.append, variables={"A": "a"})
    assert sorted(lines)[0] == "a" and "word" not in capfd.readouterr().err + "".join(lines)


@pytest.mark.parametrize("run", [run_program, read_program])
def test_a_failure_has_its_last_lines(run: object) -> None:
    assert callable(run)
    code = "import sys; print('first', file=sys.stderr); sys.exit('no space left on device')"
    with pytest.raises(TrainkitError) as caught:
        run(python(code))
    assert caught.value.exit == Exit.STAGE_FAILED
    assert "exited with 1: the disk is full: no space left on device" in caught.value.message
    with pytest.raises(TrainkitError, match="is not installed on this machine"):
        run(("/nowhere/builder",))


def test_what_is_missing_has_its_way_out() -> None:
    with pytest.raises(TrainkitError, match="is not installed on this machine") as caught:
        run_program(("/nowhere/builder",), missing="do this")
    assert caught.value.hint == "do this"
