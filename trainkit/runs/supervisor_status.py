"""Who runs a run: its supervisor's sign of life (launch/supervisor.json, schema supervisor/1), and
until that is there, the process that started it (launch/maker.json, schema maker/1)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.base.files import write_json
from trainkit.base.process import ProcessIdentity, identity, is_alive
from trainkit.base.records import Record
from trainkit.runs.folder import RunFolder

# a supervisor writes its sign of life every 5 s; one that was silent for longer may be alive or not
SILENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SupervisorStatus(Record):
    """launch/supervisor.json.

    Args:
        identity: which process it is.
        host: where it runs.
        time: when it last wrote this, seconds since 1970.
        attempt: the newest attempt it began.
        address: where it listens.
        port: where it listens; 0 where it listens nowhere.
        ended: it has finished its work.
    """

    SCHEMA = "supervisor/1"
    identity: ProcessIdentity
    host: str
    time: float
    attempt: int
    address: str
    port: int
    ended: bool

    @classmethod
    def from_json(cls, value: Mapping[str, Any], name: str = "") -> SupervisorStatus:
        """Read what `to_json` wrote, or an older version, whose port may be null. Raises
        FieldError."""
        return super().from_json({**value, "port": value.get("port") or 0}, name)

    def alive(self, now: float) -> bool | None:
        """Whether it lives. None: it has been silent for too long, so that it hangs, or the file
        system does; or, on another host, is gone. A sign of the future says no more: the clocks
        of two hosts differ."""
        if self.ended or is_alive(self.identity) is False:
            return False
        if abs(now - self.time) <= SILENCE_SECONDS:
            return True
        return None


def read_supervisor_status(run: RunFolder) -> SupervisorStatus | None:
    """The supervisor's sign of life; None where there is none (yet). Raises ConfigError for a
    file of another form."""
    if not run.supervisor.is_file():
        return None
    return SupervisorStatus.from_file(run.supervisor)


def write_supervisor_status(run: RunFolder, status: SupervisorStatus) -> None:
    """Write launch/supervisor.json, whole or not at all. Raises OSError as the disk does."""
    write_json(run.supervisor, status.to_json())


@dataclass(frozen=True)
class RunStarter(Record):
    """launch/maker.json: the process that started the run, or started it again, last.

    Args:
        identity: which process it is.
        time: when, seconds since 1970 by its own clock.
        former: the supervisor's status that it found there, as `_signature` has it. While that is
            the newest, no supervisor has signed since.
    """

    SCHEMA = "maker/1"
    identity: ProcessIdentity
    time: float
    former: list[Any] | None


def write_starter(run: RunFolder) -> None:
    """Write launch/maker.json: this process is about to supervise the run, or to have it
    supervised."""
    starter = RunStarter(identity(), time.time(), _signature(read_supervisor_status(run)))
    write_json(run.maker, starter.to_json())


def read_starter(run: RunFolder) -> RunStarter | None:
    """Who started the run last; None where no process has said so. Raises ConfigError for a file
    of another schema."""
    if not run.maker.is_file():
        return None
    return RunStarter.from_file(run.maker)


def _signature(status: SupervisorStatus | None) -> list[Any] | None:
    """Tells one sign of life from another without comparing clocks, which are those of two
    hosts."""
    if status is not None:
        return [status.identity.to_json(), status.time]
    return None


def is_starting(run: RunFolder, status: SupervisorStatus | None) -> bool:
    """Whether a process is just starting the run, or starting it again, and no supervisor has
    signed since.

    Args:
        run: the run.
        status: its supervisor's newest sign of life.
    """
    starter = read_starter(run)
    if starter is None or _signature(status) != starter.former:
        return False
    alive = is_alive(starter.identity)
    if alive is not None:
        return alive
    return time.time() - starter.time <= SILENCE_SECONDS
