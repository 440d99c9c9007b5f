"""launcher = "local": the one agent is a child of the supervisor."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.launch.launchers.contract import Transports
from trainkit.launch.launchers.transports import TransportPerHost, start_transport
from trainkit.launch.session import Session, transport_log


class Local:
    """This machine alone. The agent sees of the caller's environment what the session passes on,
    and so do its ranks."""

    name = "local"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        if len(nodes) != 1:
            raise ConfigError(
                f"launcher = 'local' is this machine alone; nodes = {len(nodes)} need launcher ="
                " 'ssh' or 'pdsh' and a hostfile"
            )
        return [local_argv(session, node) for node in nodes]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        self.commands(session, nodes)
        return TransportPerHost({node: start_local_agent(session, node) for node in nodes})


def start_local_agent(session: Session, node: int) -> tuple[subprocess.Popen[bytes], Path]:
    """An agent started on this machine, and the file its output goes to."""
    output = transport_log(session, node)
    return (
        start_transport(
            local_argv(session, node), output, environment=session.environment, keep_stdin=False
        ),
        output,
    )


def local_argv(session: Session, node: int) -> tuple[str, ...]:
    """What starts an agent on this machine."""
    return ("/bin/bash", str(session.script), str(node))
