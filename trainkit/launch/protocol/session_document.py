"""session.json, the form session/1: what an agent has to know of its session.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record

FILE_NAME = "session.json"


@dataclass(frozen=True)
class SessionDocument(Record):
    """One session as its agents see it.

    Args:
        run: the run's id, or a name of its own where there is no run.
        attempt: its number.
        address, port: where the supervisor listens.
        lease: seconds of silence that are a lost contact.
        grace: seconds from TERM to KILL.
        node_folder: each node's own, for locks and heartbeats.
        interface: the network of the ranks.
        root: the folder that all hosts share.
        snapshot: SHA-256 of the code.
        nonce: what only who sees this folder can know.
        folder: the run's, for messages of other runs.
        term: "save" where TERM is sent to every process of a job and the supervisor says what is
            next; "pass" where it means that this one host ends: the supervisor hears of it.
        stdin: "none" where its end means nothing.
    """

    SCHEMA = "session/1"
    run: str
    attempt: int
    address: str
    port: int
    interface: str | None
    root: str
    lease: float
    grace: float
    node_folder: str
    nonce: str
    snapshot: str = ""
    folder: str | None = None
    term: str = "stop"
    stdin: str = "held"


def read_session(folder: Path) -> SessionDocument:
    """Read session.json of a session's folder. Raises ConfigError where it is missing, of
    another form, or a field is missing or wrong."""
    return SessionDocument.from_file(folder / FILE_NAME)
