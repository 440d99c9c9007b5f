"""What a dry run shows of a session that nobody opens."""

from __future__ import annotations

import shlex

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.contract import Command, engine_lines
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.launchers import LAUNCHERS
from trainkit.launch.session import Session
from trainkit.launch.supervise.attempt_context import new_session
from trainkit.runs.folder import RunFolder


def script_lines(session: Session) -> list[str]:
    """How each node gets into its container, for people; nothing where there is none."""
    lines = []
    for name, text in session.scripts().items() if session.container else ():
        lines.append(f"would write {session.folder / name}:")
        lines += [f"  {line}" for line in text.rstrip("\n").split("\n")]
    return lines


@dataclass(frozen=True)
class StartPreview:
    """What an attempt would start.

    Args:
        command: of the ranks.
        launcher_lines: the command lines of the launcher.
        lines: all of it for people.
    """

    command: Command
    launcher_lines: list[list[str]]
    lines: list[str]


def preview_start(
    run: RunFolder, job: Job, attempt: int, hosts: HostList, *, background: bool
) -> StartPreview:
    """What an attempt would start where. Nothing is written.

    Args:
        run: the run's folder, which need not be there.
        job: the job.
        attempt: the attempt's number.
        hosts: where it would run.
        background: by a supervisor in a session of its own.
    """
    command = ENGINES[job.engine].command(job, run, attempt)
    session = new_session(run, attempt, job, hosts.running)
    commands = [
        list(argv) for argv in LAUNCHERS[job.cluster.launcher].commands(session, range(hosts.nodes))
    ]
    lines = []
    if background:
        lines.append(
            "would start a supervisor in a session of its own, which outlives this terminal"
        )
    lines += [f"would run: {shlex.join(argv)}" for argv in commands]
    lines += script_lines(session)
    ranks = job.ranks_per_node
    lines += [
        f"would start on {host.name}: {_span(node * ranks, ranks)}, each {shlex.join(command.argv)}"
        for node, host in enumerate(hosts.running)
    ]
    lines += engine_lines(command)
    lines += [f"  with {name}={value}" for name, value in command.env.items()]
    lines += [f"  with {name} from the environment" for name in command.secret_names]
    return StartPreview(command, commands, lines)


def _span(first: int, count: int) -> str:
    if count == 1:
        return f"rank {first}"
    return f"ranks {first} to {first + count - 1}"
