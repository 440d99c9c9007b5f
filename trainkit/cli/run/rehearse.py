"""The task `rehearse`: a table of what held, what failed and what could not be looked at."""

from __future__ import annotations

from rich.markup import escape

from trainkit.base.errors import TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.options import RehearseOptions
from trainkit.jobs.load import Jobs
from trainkit.rehearse.rehearse import RehearsalReport, State, rehearse as rehearse_job

MARKS: dict[State, str] = {
    "held": "[green]held[/]",
    "failed": "[red]failed[/]",
    "not looked at": "[yellow]not looked at[/]",
}


def rehearse(task: TaskContext, name: str, options: RehearseOptions) -> TaskResult:
    """The task `rehearse`.

    Args:
        task: how the task speaks.
        name: of the job.
        options: how it would be started.
    """
    report = run_rehearsal(task, load_jobs(task), name, options)
    return TaskResult(report.to_json(), report.exit)


def run_rehearsal(
    task: TaskContext, jobs: Jobs, name: str, options: RehearseOptions
) -> RehearsalReport:
    """Rehearse a job and print what was found."""
    report = rehearse_job(jobs, name, options)
    table = Listing("check", "", "what was found")
    for check in report.checks:
        table.add_row(check.name, MARKS[check.state], escape(check.message))
        if check.state == "failed" and check.hint:
            place = f" ({check.place})" if check.place else ""
            table.add_row("", "", escape(f"-> {check.hint}{place}"))
    task.console.print(table)
    seen = report.count("held") + report.count("failed")
    text = f"{name}: of {seen} checks that were made {report.count('failed')} failed"
    if report.not_known:
        text += f"; not known yet: {', '.join(report.not_known)}"
    task.say(f"{text} ({report.seconds:.1f} s)")
    return report


def refuse_failed(task: TaskContext, report: RehearsalReport) -> None:
    """Raise TrainkitError with what failed, before anything is started."""
    failed = [check for check in report.checks if check.state == "failed"]
    if failed:
        raise TrainkitError(
            f"the rehearsal of {report.job} failed: {failed[0].name}: {failed[0].message}",
            exit=report.exit,
            hint=failed[0].hint or f"{task.command} rehearse {report.job}",
        )
