"""launcher = "slurm": one srun for all nodes of the allocation that the supervisor runs in, one
agent a node.

srun ends a step without grace when it is asked to, and its exit code is that of its
unluckiest task, so it only carries agents: they stop ranks, and say how those ended. With pyxis
the agents' step is in the container from its start; a step without one looks at the mounts
before it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.launch.containers import NodeContainer
from trainkit.launch.containers.pyxis import (
    LOOK,
    STEP,
    exported,
    mount_check_minutes,
    pyxis_options,
    step_scripts,
)
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.launchers.transports import (
    SharedTransport,
    kill_transports,
    last_line,
    start_transport,
)
from trainkit.launch.session import Session, transport_log

# Variables that sbatch sets of options for ranks; they would be options of an srun whose tasks are
# agents
NOT_FOR_AGENTS = re.compile(
    r"SLURM_(NTASKS|NPROCS|NTASKS_PER_.*|TASKS_PER_NODE|CPUS_PER_TASK|GPUS_PER_TASK"
    r"|TRES_PER_TASK|DISTRIBUTION|NNODES|JOB_NUM_NODES)"
)
# a step beside others of the job, which neither reads nor is an MPI program
CARRIES = ("--overlap", "--input=none", "--mpi=none")
TASK_ENDED = re.compile(
    rb"srun: error: (\S+): tasks? [\d,-]+: (?:Exited with exit code (\d+)|(\w.*))"
)


class Slurm:
    """Agents as the tasks of one step.

    Args:
        further: more options of srun; outside an allocation srun makes one of its own by them.
    """

    name = "slurm"

    def __init__(self, further: Sequence[str] = ()) -> None:
        self.further = tuple(further)

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        hosts = [session.hosts[node] for node in nodes]
        looks = [mount_check_argv(session, hosts, os.environ)] if pyxis_container(session) else []
        return [
            (argv[0], *self.further, *argv[1:])
            for argv in (*looks, srun_argv(session, hosts, os.environ, nodes[0]))
        ]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        if shutil.which("srun") is None:
            raise TrainkitError(
                "srun is not installed on this machine",
                exit=Exit.START,
                hint="the supervisor of a Slurm run has to run inside its allocation",
            )
        lines = self.commands(session, nodes)
        first = nodes[0]
        hosts = {node: session.hosts[node] for node in nodes}
        argv = lines[-1]
        environment = {
            name: value for name, value in os.environ.items() if not NOT_FOR_AGENTS.fullmatch(name)
        }
        write_text(node_script(session, first), node_text(session, hosts), 0o755)
        if container := pyxis_container(session):
            scripts = step_scripts(container, lines, session.connect)
            step = session.folder / f"{first or ''}{STEP}"
            write_text(session.folder / LOOK, scripts[LOOK], 0o755)
            write_text(step, scripts[STEP], 0o755)
            argv = ("/bin/bash", str(step))
            environment = {**environment, **container.env}
        output = session.logs / f"srun{first or ''}.log"
        child = start_transport(argv, output, environment=environment, keep_stdin=False)
        return _Step(
            child,
            output,
            {node: transport_log(session, node) for node in nodes},
            {host.name: node for node, host in hosts.items()},
        )


def pyxis_container(session: Session) -> NodeContainer | None:
    """The container that srun itself puts the agents into."""
    if session.container is not None and session.container.settings.runtime_traits.by_srun:
        return session.container
    return None


def srun_argv(
    session: Session, hosts: Sequence[Host], environment: Mapping[str, str], first: int = 0
) -> tuple[str, ...]:
    """The line of srun that starts the agents.

    Args:
        environment: the allocation's: srun itself no longer takes --cpus-per-task from it (Slurm
            22.05 and later).
        first: the number of the first of these hosts in the session.
    """
    # which agents stop, and how, is the supervisor's word: a step that srun ends saves nothing
    ends = ("--kill-on-bad-exit=0", "--wait=0")
    container = pyxis_container(session)
    # prolog and login are the host's
    task = (*pyxis_options(container), "/bin/bash") if container else ("/bin/bash", "-l")
    export = _export_options(environment, container.env if container else {})
    further = session.cluster.srun_args
    argv = (
        "srun",
        *_placement_options(hosts),
        *ends,
        *CARRIES,
        *cpu_options(environment),
        *export,
        *_output_options(session),
        *further,
    )
    return (*argv, *task, str(node_script(session, first)))


def mount_check_argv(
    session: Session, hosts: Sequence[Host], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The line of srun that looks at the mounts of pyxis, outside of any container and on all
    nodes, whatever one of them says."""
    ends = ("--kill-on-bad-exit=0", f"--time={mount_check_minutes(session.connect)}")
    task = ("/bin/bash", str(session.folder / LOOK))
    return (
        "srun",
        *_placement_options(hosts),
        *ends,
        *CARRIES,
        *_export_options(environment, {}),
        *_output_options(session),
        *task,
    )


def _placement_options(hosts: Sequence[Host]) -> tuple[str, ...]:
    count = len(hosts)
    return (
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(host.name for host in hosts)}",
    )


def _output_options(session: Session) -> tuple[str, ...]:
    return (f"--output={session.logs}/%N.log", "--open-mode=append")


def _export_options(environment: Mapping[str, str], further: Mapping[str, str]) -> tuple[str, ...]:
    names = environment.get("SLURM_EXPORT_ENV")
    return (f"--export={exported(names, further)}",) if names else ()


def cpu_options(environment: Mapping[str, str]) -> tuple[str, ...]:
    """All CPUs that the job has on a node for the one task there; ranks share them, so the agent
    is bound to none."""
    bound = () if environment.get("SLURM_HINT") else ("--cpu-bind=none",)
    if asked := environment.get("SLURM_CPUS_PER_TASK"):
        return (
            f"--cpus-per-task={int(asked) * int(environment.get('SLURM_NTASKS_PER_NODE') or 1)}",
            *bound,
        )
    given = environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    counts = [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", given)]
    # before the job runs, a word that stands for the number
    least = str(min(counts)) if counts else given
    return ((f"--cpus-per-task={least}",) if least and bound else ()) + bound


def node_script(session: Session, first: int) -> Path:
    """What srun runs on each node: from Slurm's name of it to its number in the session."""
    return session.folder / f"srun{first or ''}.sh"


def node_text(session: Session, hosts: Mapping[int, Host]) -> str:
    """The script, for these hosts by their numbers. The first step's SLURM_NODEID counts them in
    the same order; the name is proof against any other (--distribution, a node left out)."""
    container = pyxis_container(session)
    runs = f"/bin/bash {container.script}" if container else f"/bin/bash -l {session.script}"
    lines = [
        "#!/bin/bash",
        f"nodes=({' '.join(f'[{node}]={host.name}' for node, host in hosts.items())})",
        'for node in "$SLURM_NODEID" "${!nodes[@]}"; do',
        f'    [ "${{nodes[node]}}" != "$SLURMD_NODENAME" ] || exec {runs} "$node"',
        "done",
        'echo "$SLURMD_NODENAME is not a node of this session: ${nodes[*]}" >&2',
        "exit 8",
    ]
    return "\n".join(lines) + "\n"


@dataclass(eq=False)
class _Step(SharedTransport):
    """One srun; what a node's task said last stands in the node's own log, what srun says of it
    in srun's."""

    _ended: dict[int, TransportExit] = field(default_factory=dict, init=False)

    def poll(self) -> Mapping[int, TransportExit]:
        code = self.child.poll()
        self._look()
        if code is not None:
            for node, log in self.logs.items():
                self._ended.setdefault(
                    node, TransportExit(code, last_line(log) or last_line(self.output))
                )
        return self._ended

    def _look(self) -> None:
        """Note tasks that srun says have failed: it goes on until the last has ended."""
        for host, code, text in TASK_ENDED.findall(self.new_lines()):
            if (node := self.node_of(host)) is not None:
                self._ended[node] = TransportExit(
                    int(code or -9), last_line(self.logs[node]) or text.decode(errors="replace")
                )

    def close(self) -> None:
        kill_transports([self.child])
