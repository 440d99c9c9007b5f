"""The task `drill`: what it will do, and the score card of what it did."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.files import write_text
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.stages import stage_ui
from trainkit.cli.run.summary import faults_table
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.options import TrainOptions
from trainkit.rehearse.drill import SAVE_INTERVAL, Drill, DrillReport, Score, plan_drill
from trainkit.rehearse.harm import FAULTS, NOT_MADE
from trainkit.reports.page import report_page
from trainkit.reports.read import read_report

NUMBERS = ("detected after", "recovered after", "steps lost")


def drill(task: TaskContext, name: str, options: TrainOptions, html: str) -> TaskResult:
    """The task `drill`.

    Args:
        task: how it was called.
        name: of the job.
        options: how its runs are started.
        html: the file to write the report of the run that is hurt into; "": none.
    """
    start = plan_drill(load_jobs(task), name, options)
    hosts = ", ".join(host.name for host in start.hosts.running)
    task.say(
        f"two runs of {name} on {hosts}, of their own (runs/{name}-drill), a checkpoint every"
        f" {SAVE_INTERVAL} steps unless --set says otherwise: one is hurt, the other one left alone"
    )
    for number, fault in enumerate(FAULTS, 1):
        task.say(f"  {number}. {fault.name}: {fault.words}")
    for fault_name, why in NOT_MADE.items():
        task.say(f"  not made: {fault_name}: {why}")
    task.say(
        "each takes as long as the run needs to start again and to save; a hang is known after"
        f" cluster.watch.heartbeat = {start.job.cluster.watch.heartbeat:g} s at the latest"
    )
    if task.dry_run:
        faults = [{"fault": fault.name, "words": fault.words} for fault in FAULTS]
        return TaskResult(document("drill-plan/1", job=name, faults=faults, not_made=NOT_MADE))
    report = Drill(start, stage_ui(task), task.say).conduct()
    if html:
        write_text(Path(html), report_page(read_report(report.run)))
        task.say(f"wrote {html}")
    return TaskResult(report.to_json(), report.exit, page=_page(report))


def _page(report: DrillReport) -> Page:
    table = Listing("fault", *NUMBERS, "from", "equal", "nothing left", "", right=NUMBERS)
    for score in report.scores:
        table.add_row(escape(score.fault), *_cells(score), escape("; ".join(_wrong(score))))
    yield table
    yield from (f"left behind: {line}" for line in report.left)
    yield faults_table(read_report(report.run).faults)


def _cells(score: Score) -> list[str]:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f} s"

    if not score.made:
        return ["", "", "", "", "", ""]
    lost = "" if score.steps_lost is None else str(score.steps_lost)
    equal = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}[score.equal]
    nothing = "[red]NO[/]" if score.left else "[green]yes[/]"
    times = (seconds(score.detected), seconds(score.recovered))
    return [*times, lost, escape(score.source), equal, nothing]


def _wrong(score: Score) -> list[str]:
    why = score.error if score.made else f"not made: {score.error}"
    return [*([why] if score.error else []), *score.left]
