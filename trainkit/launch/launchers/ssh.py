"""launcher = "ssh": one ssh a host, all at once."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import Transports
from trainkit.launch.launchers.local import local_argv, start_local_agent
from trainkit.launch.launchers.transports import TransportPerHost, kill_on_error, start_transport
from trainkit.launch.session import Session, is_this_machine, transport_log

ALIVE_SECONDS = 5  # between ssh's own signs of life
# A connection of its own for each host: one that is shared ends for all when its master does, and
# forwardings of a person's ~/.ssh/config collide.
ALONE = ("-oControlMaster=no", "-oControlPath=none", "-oClearAllForwardings=yes")


def ssh_options(session: Session) -> tuple[str, ...]:
    """Options of every ssh. The cluster's own come first: of two values of one option ssh takes
    the first."""
    # so that ssh's own words about a dead host are there in time
    timeout = max(1, round(session.cluster.connect_seconds() / 2))
    # The lease is what ends the ranks. ssh is not to give up before: the gaps between TCP's tries
    # double, so that it hears nothing for up to twice a cut
    patience = max(3, round(2 * session.lease / ALIVE_SECONDS))
    return (
        *session.cluster.ssh_args,
        "-T",
        "-oBatchMode=yes",
        f"-oConnectTimeout={timeout}",
        f"-oServerAliveInterval={ALIVE_SECONDS}",
        f"-oServerAliveCountMax={patience}",
        *ALONE,
    )


class Ssh:
    """Agents over OpenSSH; ~/.ssh/config is honoured, nothing is ever asked for."""

    name = "ssh"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        return [self._argv(session, node) for node in nodes]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        here = [node for node in nodes if is_this_machine(session.hosts[node])]
        if len(here) < len(nodes) and shutil.which("ssh") is None:
            raise TrainkitError(
                "ssh is not installed on this machine",
                exit=Exit.START,
                hint="install OpenSSH's client",
            )
        with kill_on_error() as children:
            for node in nodes:
                output = transport_log(session, node)
                if node in here:
                    children[node] = start_local_agent(session, node)
                else:
                    argv = self._argv(session, node)
                    children[node] = (start_transport(argv, output, keep_stdin=True), output)
            return TransportPerHost(children)

    def _argv(self, session: Session, node: int) -> tuple[str, ...]:
        host = session.hosts[node]
        if is_this_machine(host):
            return local_argv(session, node)
        port = ("-p", str(host.port)) if host.port else ()
        user = ("-l", host.user) if host.user else ()
        return (
            "ssh",
            *ssh_options(session),
            *port,
            *user,
            host.name,
            "bash",
            str(session.script),
            str(node),
        )


def ssh_host_name(cluster: Cluster, host: Host) -> str:
    """The name or address that ssh would dial for a host, which may be an alias of
    ~/.ssh/config; the host's own name where ssh cannot say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = ["ssh", *cluster.ssh_args, "-G", host.name]
        said = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
        found = [
            line.partition(" ")[2] for line in said.splitlines() if line.startswith("hostname ")
        ]
        if found:
            return found[0]
        return host.name
    return host.name
