"""What a launcher is: it starts one agent a host, and knows how its transports ended. Everything
else is said over the agents' own connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.launch.session import Session


@dataclass(frozen=True)
class TransportExit:
    """How the transport to one host ended.

    Args:
        code: its exit code, negative for a signal. Never the truth about the ranks.
        last: its last line of output, "" if it said nothing.
    """

    code: int
    last: str


class Transports(Protocol):
    """The transports of one session."""

    def poll(self) -> Mapping[int, TransportExit]:
        """Those that have ended so far, by node. Returns at once."""

    def close(self) -> None:
        """End those that are left, by their pids; bounded in time."""


class Launcher(Protocol):
    """One way to start agents."""

    name: str

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        """The command lines that `start` would run, for a dry run."""

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        """Start an agent for each of these nodes of the session, which follow each other. Does not
        wait for them. No node is started twice.

        Raises TrainkitError (exit 3 or 8) where it cannot even try: a host name that does not
        fit, a program that is not installed; NoStart where a host is to blame for that.
        """
