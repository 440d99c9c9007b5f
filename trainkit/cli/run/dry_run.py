"""What a dry run shows of a session that nobody opens."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.schema import Job
from trainkit.launch.containers import node_container, reusable_since
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.session import Session
from trainkit.runs.folder import RunFolder


def session_to_show(job: Job, run: RunFolder, attempt: int, hosts: Sequence[Host]) -> Session:
    """The session of an attempt as it would be; the code's hash is not known yet."""
    folder = run.session(attempt)
    code = run.root / "code" / "SHA256"
    box = node_container(job, folder, run.id, attempt, reusable_since(run))
    return Session(
        folder, run.id, attempt, hosts, job.cluster, code, run.attempt(attempt).transports, {}, box
    )


def say_scripts(task: TaskContext, session: Session) -> None:
    """How each node gets into its container, where there is one."""
    for name, text in session.scripts().items() if session.container else ():
        task.say(f"would write {session.folder / name}:")
        for line in text.rstrip("\n").split("\n"):
            task.say(f"  {line}")
