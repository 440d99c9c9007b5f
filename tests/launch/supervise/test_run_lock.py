"""One supervisor a run; one that has only to close is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import locked
from trainkit.launch.supervise import run_lock
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.events import AttemptEnded, AttemptStarted, EventLog
from trainkit.runs.folder import RunFolder


class Holder:
    """Another process's supervisor, as far as the lock is concerned."""

    def __init__(self, run: RunFolder) -> None:
        self.lets_go = threading.Event()
        self.holds = threading.Event()
        self.thread = threading.Thread(target=self._hold, args=(run,))
        self.thread.start()
        self.holds.wait()

    def _hold(self, run: RunFolder) -> None:
        with locked(run.path / "lock", {}):
            self.holds.set()
            self.lets_go.wait()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "job" / "20260101-000000-aaaa")


@pytest.fixture
def holder(run: RunFolder) -> Iterator[Holder]:
    holder = Holder(run)
    yield holder
    holder.lets_go.set()
    holder.thread.join()


def write_end(run: RunFolder, number: int, budget: str | None) -> None:
    """An attempt that ended; `budget`: what another uses up, None where none follows."""
    events = EventLog(run.attempt(number))
    events.write(AttemptStarted(run.id, number, {}, 1))
    events.write(
        AttemptEnded(
            exit=0 if budget is None else 10,
            root_cause=None,
            step=4,
            survivors=[],
            unanswered=[],
            failure_class="success" if budget is None else "infra",
            budget=budget,
        )
    )


def test_one_that_closes_is_waited_for(
    run: RunFolder, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_end(run, 1, None)
    # it lets go while somebody waits
    monkeypatch.setattr("time.sleep", lambda _: holder.lets_go.set())
    with locked_run(run):
        assert holder.lets_go.is_set()


def test_one_that_never_closes(
    run: RunFolder, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_end(run, 1, None)
    monkeypatch.setattr(run_lock, "CLOSING_SECONDS", 0.1)
    with pytest.raises(TrainkitError, match="is running already") as error, locked_run(run):
        pass
    assert error.value.exit == 17


@pytest.mark.parametrize("attempts", [0, 1])
def test_one_that_goes_on_is_not_waited_for(
    run: RunFolder, holder: Holder, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two attempts, and before the first."""
    monkeypatch.setattr(run_lock, "CLOSING_SECONDS", 1e9)
    for number in range(attempts):
        write_end(run, number + 1, "infra")
    with pytest.raises(TrainkitError, match="is running already"), locked_run(run):
        pass
