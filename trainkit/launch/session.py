"""A session: the folder on the shared root by which agents and supervisor find and prove
themselves to each other.

`session.json` says where the supervisor listens, `token` (0600) proves who may speak,
`secrets.json` (0600) has the values of secrets while ranks need them, and `node.sh` is all that
a transport has to run: the words on an ssh or pdsh line are safe ones, whatever the job
contains. With a container around the agent node.sh starts that, and it runs `inside.sh`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.address import local_addresses
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json, write_text
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.process_marks import MARK_VARIABLE
from trainkit.jobs.clusters import Cluster
from trainkit.launch.containers import NodeContainer
from trainkit.launch.containers.runtimes import extra_files, start_lines
from trainkit.launch.containers.scripts import inside_script
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.programs import program_path
from trainkit.launch.protocol.session_document import FILE_NAME, SessionDocument

LOCAL_LEASE = 1e6
SECRETS = "secrets.json"  # in a session's folder, 0600, until every rank runs
SAFE_PATH = re.compile(r"[A-Za-z0-9_./+=:@,-]+")


@dataclass
class Session:
    """One session as its supervisor knows it; nobody else knows it before `write`.

    Args:
        folder: on the shared root.
        run: the run's id, or a name of its own where there is no run.
        attempt: its number, 0 where there is no run.
        hosts: by the numbers of their agents; more may come.
        cluster: limits, prolog, interpreter, ssh's arguments.
        code: the folder of the code snapshot, <root>/code/<sha256>, or a link to it.
        logs: where the transports' output goes, a file a host.
        environment: what local agents get to see of the caller's environment.
        container: that agents, and so all that they start, run in.
        grace: seconds from TERM to KILL; None: the cluster's.
        token: what both sides prove to know.
        nonce: what can be known only by what sees this folder.
    """

    folder: Path
    run: str
    attempt: int
    hosts: Sequence[Host]
    cluster: Cluster
    code: Path
    logs: Path
    environment: Mapping[str, str]
    container: NodeContainer | None = None
    grace: float | None = None
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        # the snapshot's own folder, whose name is its hash, and not a link to it
        self.code = self.code.resolve()

    @property
    def local(self) -> bool:
        """Whether the agents run on this machine, with nothing but `environment` and what the
        prolog adds to it."""
        return self.cluster.launcher_traits.one_machine

    @property
    def python(self) -> str:
        """The interpreter on the nodes."""
        if self.local:
            return sys.executable
        return self.cluster.python or sys.executable

    @property
    def lease(self) -> float:
        """Seconds of silence that are a lost contact. On one machine an end is always heard, and
        a stopped terminal (Ctrl-Z) is not a loss."""
        return LOCAL_LEASE if self.local else self.cluster.watch.lease

    @property
    def script(self) -> Path:
        """What a transport runs: `bash node.sh K`."""
        return self.folder / "node.sh"

    @property
    def agent_mark(self) -> str:
        """TRAINKIT_RUN of this session's agents and their keepers: found with the run, but not
        with what they started. A line of bash adds the node."""
        return f"{self.run}/{self.attempt}/agents/"

    @property
    def connect(self) -> float:
        """Seconds until the agents of all hosts must have answered."""
        return self.cluster.connect_seconds(container=self.container is not None)

    def mark(self, node: int) -> str:
        """TRAINKIT_RUN of every process of this session on one node."""
        return f"{self.run}/{self.attempt}/{node}"

    def add(self, host: Host) -> int:
        """The number of one more agent, which may come now."""
        self.hosts = (*self.hosts, host)
        return len(self.hosts) - 1

    def write(self, root: Path, address: str, port: int, secret_values: Mapping[str, str]) -> None:
        """Make the folder. Only now can an agent connect: it has to know where to.

        Args:
            root: the folder that all hosts share.
            address: where the supervisor listens.
            port: likewise.
            secret_values: of variables that ranks get.

        Raises:
            ConfigError: the folder's name does not fit on an ssh line.
        """
        cluster = self.cluster
        if not self.local and not SAFE_PATH.fullmatch(str(self.folder)):
            hint = "ssh lines carry this path unquoted: letters, digits and _ . / + = : @ , - only"
            raise ConfigError(
                f"clusters.{cluster.name}.root: {self.folder} does not fit on an ssh line",
                hint=hint,
            )
        self.folder.mkdir(parents=True, mode=0o700)
        self.logs.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "token", self.token.hex() + "\n", 0o600)
        self.write_secrets(secret_values)
        traits = cluster.launcher_traits
        session = SessionDocument(
            run=self.run,
            attempt=self.attempt,
            address=address,
            port=port,
            interface=cluster.interface,
            root=str(root),
            snapshot=self.code.name,
            lease=self.lease,
            grace=cluster.watch.grace if self.grace is None else self.grace,
            node_folder=cluster.node_folder,
            nonce=self.nonce,
            folder=str(self.folder.parent.parent),
            term=traits.term,
            # with --input=none a task's is a pipe that slurmstepd soon closes
            stdin="none" if traits.batch else "held",
        )
        write_json(self.folder / FILE_NAME, session.to_json())
        for name, text in self.scripts().items():
            write_text(self.folder / name, text, 0o755)

    def write_secrets(self, values: Mapping[str, str]) -> None:
        """Have the values of secrets there until `forget_secrets`."""
        if values:
            write_json(self.folder / SECRETS, dict(values), 0o600)

    def scripts(self) -> dict[str, str]:
        """What nodes run, by its name in the folder."""
        agent = ["-I", "-S", str(program_path(self.code, "agent")), str(self.folder)]
        marked = f'export {MARK_VARIABLE}={shlex.quote(self.agent_mark)}"$1"'
        head = [
            "#!/bin/bash",
            "# What every node of this session runs: node.sh NODE",
            "set -e",
            *self.cluster.prolog,
        ]
        if self.container is None:
            return {
                self.script.name: (
                    "\n".join([*head, marked, f'exec {shlex.join([self.python, *agent])} "$1"'])
                    + "\n"
                )
            }
        inside = {
            self.container.script.name: inside_script(self.container, agent, marked),
            **extra_files(self.container),
        }
        if self.container.settings.runtime_traits.by_srun:
            return inside  # srun's task is in the container from its start
        return {self.script.name: "\n".join([*head, *start_lines(self.container)]) + "\n", **inside}

    def forget_secrets(self) -> None:
        """Delete the values of secrets."""
        (self.folder / SECRETS).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the whole folder; for sessions that do not belong to a run."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)


def transport_log(session: Session, node: int) -> Path:
    """Where the output of a node's transport goes. Hosts are named by others, so a name cannot
    leave the folder."""
    return session.logs / f"{session.hosts[node].name.replace(os.sep, '_')}.log"


def is_this_machine(host: Host) -> bool:
    """Whether a host of the hostfile is this very machine, so that nothing needs to carry its
    agent."""
    return host.name in (
        "localhost",
        "127.0.0.1",
        "::1",
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
    ) or host.name in {address for _, address in local_addresses()}
