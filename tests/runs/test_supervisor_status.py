"""Who runs a run: the supervisor's sign of life, and the process that started the run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json
from trainkit.base.process import identity
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import (
    SILENCE_SECONDS,
    SupervisorStatus,
    is_starting,
    read_starter,
    read_supervisor_status,
    write_starter,
    write_supervisor_status,
)

OURS = SupervisorStatus(identity(), os.uname().nodename, 1000.0, 2, "10.0.0.1", 4711, ended=False)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    assert read_supervisor_status(run) is None
    write_supervisor_status(run, OURS)
    assert read_supervisor_status(run) == OURS
    keys = ["schema", "identity", "host", "time", "attempt", "address", "port", "ended"]
    assert list(read_json(run.supervisor)) == keys
    write_supervisor_status(run, replace(OURS, ended=True))
    assert read_supervisor_status(run) == replace(OURS, ended=True)


@pytest.mark.parametrize("wrong", [{"identity": {"pid": 1}}, {"time": "noon"}, {"attempt": None}])
def test_another_form_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    value = OURS.to_json()
    with pytest.raises(ValueError):
        SupervisorStatus.from_json(value | wrong)
    del value["host"]
    with pytest.raises(ValueError, match="host is missing"):
        SupervisorStatus.from_json(value)
    assert SupervisorStatus.from_json(OURS.to_json() | {"port": None}).port == 0
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    run.supervisor.parent.mkdir(parents=True)
    run.supervisor.write_text('{"schema": "supervisor/2"}')
    with pytest.raises(ConfigError, match="supervisor/2"):
        read_supervisor_status(run)


def test_whether_it_lives() -> None:
    """While it signs, here as on another host. Of one that is silent only that it is gone can be
    seen, and only here; a sign of the future says as little."""
    far = replace(OURS, identity=replace(OURS.identity, host="elsewhere"), host="elsewhere")
    assert OURS.alive(OURS.time + SILENCE_SECONDS) is True
    assert OURS.alive(OURS.time + SILENCE_SECONDS + 0.1) is None
    assert replace(OURS, ended=True).alive(OURS.time) is False
    assert replace(OURS, identity=replace(OURS.identity, start_time=1)).alive(OURS.time) is False
    assert far.alive(far.time + SILENCE_SECONDS) is True
    assert far.alive(far.time + SILENCE_SECONDS + 0.1) is None
    assert far.alive(far.time - SILENCE_SECONDS - 0.1) is None
    assert replace(far, ended=True).alive(far.time) is False


def test_it_is_starting_until_a_supervisor_signs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    assert read_starter(run) is None and not is_starting(run, None)
    write_starter(run)
    starter = read_starter(run)
    assert starter is not None and (starter.identity, starter.former) == (identity(), None)
    assert list(read_json(run.maker)) == ["schema", "identity", "time", "former"]
    assert is_starting(run, None)
    assert not is_starting(run, OURS)  # it has signed since
    write_supervisor_status(run, OURS)
    write_starter(run)  # started again
    assert is_starting(run, OURS)
    assert not is_starting(run, replace(OURS, time=OURS.time + 5))


def test_a_starter_of_another_host_counts_for_a_while(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    write_starter(run)
    text = run.maker.read_text().replace(f'"host": "{os.uname().nodename}"', '"host": "elsewhere"')
    run.maker.write_text(text)
    assert is_starting(run, None)
    written = read_json(run.maker)["time"]
    run.maker.write_text(text.replace(str(written), str(time.time() - SILENCE_SECONDS - 5)))
    assert not is_starting(run, None)
