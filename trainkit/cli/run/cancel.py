"""The task `cancel`: ends a run, and asks every node what is left of it."""

from __future__ import annotations

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.cancel import Cancellation, HostLeftovers, cancel_run
from trainkit.runs.find import find_run
from trainkit.runs.record import RunRecord


def cancel(task: TaskContext, text: str, *, save: bool, force: bool = False) -> TaskResult:
    """The task `cancel`.

    Args:
        task: how the task speaks.
        text: which run.
        save: first save at the end of the step.
        force: hosts that do not answer count as gone; a supervisor here that does not is killed.
    """
    run = find_run(load_jobs(task).roots(), text)
    cancelled = cancel_run(run, save=save, force=force, say=task.say)
    if cancelled.hosts is not None:
        _print(task, cancelled, cancelled.hosts)
    hosts = [host.to_json() for host in cancelled.hosts or ()]
    return TaskResult(document("cancel/1", **_head(cancelled.record), hosts=hosts), cancelled.exit)


def _head(record: RunRecord) -> dict[str, object]:
    return {
        "run": record.run.id,
        "job": record.run.job_name,
        "state": record.state,
        "exit": record.exit,
        "class": record.failure_class,
    }


def _print(task: TaskContext, cancelled: Cancellation, hosts: list[HostLeftovers]) -> None:
    record = cancelled.record
    table = Listing("host", "left")
    for host in hosts:
        table.add_row(escape(host.host), escape(leftovers_line(host)))
    if not task.json:
        task.console.print(table)
    if cancelled.exit == Exit.PREEMPTED:
        task.say(f"saved at step {record.step}; {task.command} resume {record.run.id} goes on")
    elif record.state == "preempted":
        task.say("stopped before it had saved: it would go on from an older checkpoint")


def leftovers_line(host: HostLeftovers) -> str:
    """What is left on a host, for people; "nothing" only as far as that is proved."""
    if not host.answered:
        why = f": {host.error}" if host.error else "; what is left there is not known"
        return f"did not answer{why}"
    processes = ", ".join(
        f"pid {each['pid']} {each.get('argv0', '')}".rstrip() for each in host.left
    )
    if processes:
        return processes
    unproved = ""
    if host.proof is None:
        unproved = " that can be seen (no cgroup there: see `doctor`)"
    killed = ""
    if host.killed:
        killed = f" ({host.killed} ended just now)"
    return f"nothing{unproved}{killed}"
