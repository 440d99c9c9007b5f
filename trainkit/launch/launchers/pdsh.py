"""launcher = "pdsh": one pdsh for all hosts, ssh underneath.

pdsh forwards no stdin and no signal, rewrites %h %n %u in its arguments and waits for the slowest
host, so it carries a single safe line and is never asked how things went: agents say that
themselves.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.base.process_marks import find_descendants, kill_processes
from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.launchers.local import local_argv, start_local_agent
from trainkit.launch.launchers.ssh import ssh_options
from trainkit.launch.launchers.transports import (
    SharedTransport,
    TransportPerHost,
    kill_on_error,
    kill_transports,
    last_line,
    start_transport,
)
from trainkit.launch.session import Session, is_this_machine, transport_log

FITTING = re.compile(r"[A-Za-z0-9_.-]+")  # a host name that pdsh takes as one word
LEAST_FANOUT = 32  # pdsh's own
END_SECONDS = 1.0  # that closing waits for the last output


class Pdsh:
    """Agents over pdsh; the output of each host goes to its own log."""

    name = "pdsh"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        away = _away(session, nodes)
        here = [local_argv(session, node) for node in nodes if node not in away]
        return [*([self._argv(session, nodes)] if away else []), *here]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        if shutil.which("pdsh") is None:
            raise TrainkitError(
                "pdsh is not installed on this machine",
                exit=Exit.START,
                hint="install it, or set launcher = 'ssh'",
            )
        away = _away(session, nodes)
        output = session.logs / f"pdsh{nodes[0] or ''}.log"
        with kill_on_error() as children:
            for node in nodes:
                if node not in away:
                    children[node] = start_local_agent(session, node)
            if not away:
                return TransportPerHost(children)
            argv = self._argv(session, nodes)
            write_text(
                _script(session, nodes[0]),
                f"#!/bin/bash\nnodes=({' '.join(map(str, away))})\nexec bash {session.script}"
                ' "${nodes[$1]}"\n',
                0o755,
            )
            variables = {**os.environ, **ssh_variables(session)}
            child = start_transport(argv, output, environment=variables, keep_stdin=True)
        return PdshTransport(
            child,
            output,
            {node: transport_log(session, node) for node in away},
            labels({n: session.hosts[n].name for n in away}),
            TransportPerHost(children),
        )

    def _argv(self, session: Session, nodes: Sequence[int]) -> tuple[str, ...]:
        hosts = [session.hosts[node] for node in _away(session, nodes)]
        odd = [host.name for host in hosts if not FITTING.fullmatch(host.name)]
        if odd:
            raise ConfigError(
                f"pdsh cannot take host names like {odd[0]!r}",
                hint="set launcher = 'ssh', or name the host in ~/.ssh/config",
            )
        if ports := sorted({host.port for host in hosts if host.port}):
            hint = "write `Host NAME` and `Port N` into ~/.ssh/config, or set launcher = 'ssh'"
            raise ConfigError(
                "pdsh cannot take a port for a host (the hostfile has"
                f" {', '.join(map(str, ports))})",
                hint=hint,
            )
        names = ",".join(f"{host.user}@{host.name}" if host.user else host.name for host in hosts)
        timeout = str(max(1, round(session.cluster.connect_seconds() / 2)))
        fanout = str(max(LEAST_FANOUT, len(hosts)))
        return (
            "pdsh",
            "-R",
            "ssh",
            "-S",
            "-t",
            timeout,
            "-f",
            fanout,
            "-w",
            names,
            "bash",
            str(_script(session, nodes[0])),
            "%n",
        )


def _away(session: Session, nodes: Sequence[int]) -> list[int]:
    return [node for node in nodes if not is_this_machine(session.hosts[node])]


def _script(session: Session, first: int) -> Path:
    """What pdsh runs: from its own count of hosts (%n) to the node."""
    return session.folder / f"pdsh{first or ''}.sh"


def labels(names: Mapping[int, str]) -> dict[str, int]:
    """Nodes by what pdsh may call them: where all hosts are of one domain it leaves that away."""
    nodes = {name: node for node, name in names.items()}
    short = {node: name.partition(".")[0] for node, name in names.items() if not _is_address(name)}
    often = Counter(short.values())
    return {**{name: node for node, name in short.items() if often[name] == 1}, **nodes}


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def ssh_variables(session: Session) -> dict[str, str]:
    """The variables that give pdsh's ssh its options.

    Raises:
        ConfigError: an option has a space in it, where pdsh would split it.
    """
    options = ssh_options(session)
    if odd := [word for word in options if not word or any(c.isspace() for c in word)]:
        raise ConfigError(
            f"clusters.{session.cluster.name}.ssh_args: pdsh cannot pass {odd[0]!r} on",
            hint="write it into ~/.ssh/config, or set launcher = 'ssh'",
        )
    return {"PDSH_SSH_ARGS_APPEND": " ".join(options)}


@dataclass(eq=False)
class PdshTransport(SharedTransport):
    """One pdsh, whose lines "HOST: text" are taken apart into the hosts' logs."""

    local: TransportPerHost
    _failed: dict[int, TransportExit] = field(default_factory=dict, init=False)
    # `poll` may have a thread of its own
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def poll(self) -> Mapping[int, TransportExit]:
        with self._lock:
            self._share_out()
            ended = dict(self.local.poll())
            if self.child.poll() is not None:
                self._share_out()
                ended |= {
                    node: TransportExit(self.child.returncode, last_line(log))
                    for node, log in self.logs.items()
                }
            return {**ended, **self._failed}

    def _share_out(self) -> None:
        """Give each host's log its new whole lines, and note hosts that pdsh says are over: it
        does not return before the slowest."""
        lines: dict[int, list[bytes]] = {}
        for line in self.new_lines().splitlines():
            if found := re.match(
                rb"pdsh@[^:]*: ([^:]+): (?:ssh|rcmd).* exit(?:ed|) (?:with exit )?code (\d+)", line
            ):
                if (node := self.node_of(found[1])) is not None:
                    self._failed[node] = TransportExit(int(found[2]), "")
                continue
            name, _, text = line.partition(b": ")
            if (node := self.node_of(name)) is not None:
                lines.setdefault(node, []).append(text)
        for node, texts in lines.items():
            with open(self.logs[node], "ab") as log:
                log.write(b"\n".join(texts) + b"\n")
        for node, end in self._failed.items():
            if not end.last:
                self._failed[node] = TransportExit(end.code, last_line(self.logs[node]))

    def close(self) -> None:
        """pdsh takes no ssh client of its own with it, so those are ended first."""
        if self.child.poll() is None:
            kill_processes(find_descendants(self.child.pid))
        kill_transports([self.child])
        self.local.close()
        if self._lock.acquire(timeout=END_SECONDS):  # who looks now may wait for the file system
            try:
                with contextlib.suppress(OSError):
                    self._share_out()
            finally:
                self._lock.release()
