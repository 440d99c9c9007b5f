"""launcher = "local": the one agent is a child of the supervisor."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Started
from trainkit.launch.launchers.transports import OnePerHost, start_transport
from trainkit.launch.session import Session, log_of


class Local:
    """This machine alone. The agent sees of the caller's environment what the session passes on,
    and so do its ranks."""

    name = "local"

    def commands(self, session: Session, hosts: Sequence[Host]) -> list[tuple[str, ...]]:
        if len(hosts) != 1:
            raise ConfigError(
                f"launcher = 'local' is this machine alone; nodes = {len(hosts)} need launcher ="
                " 'ssh' or 'pdsh' and a hostfile"
            )
        return [local_words(session, 0)]

    def start(self, session: Session, hosts: Sequence[Host]) -> Started:
        self.commands(session, hosts)
        return OnePerHost({0: transport_here(session, 0)})


def transport_here(session: Session, node: int) -> tuple[subprocess.Popen[bytes], Path]:
    """An agent started on this machine, and the file its output goes to."""
    output = log_of(session, node)
    return (
        start_transport(
            local_words(session, node), output, environment=session.environment, keep_stdin=False
        ),
        output,
    )


def local_words(session: Session, node: int) -> tuple[str, ...]:
    """What starts an agent on this machine."""
    return ("/bin/bash", str(session.script), str(node))
