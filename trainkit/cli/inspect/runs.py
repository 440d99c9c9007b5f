"""The tasks `runs` and `status`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.results_table import results_table, scaling_table
from trainkit.cli.run.summary import facts_table, print_next
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_registry import current, current_all, scheduler_of
from trainkit.reports.scaling import draw_scaling, scaling_of
from trainkit.runs.devices import DeviceUsage, Gpu, observe_devices
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.results import RunResult, refuse_unknown_convention, results_of_runs

COLOURS = {
    "queued": "blue",
    "starting": "blue",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "unknown": "magenta",
}
COLOURS |= dict.fromkeys(("cancelled", "preempted"), "yellow")
WATCH_SECONDS = 2.0


@dataclass(frozen=True)
class TableForm:
    """How `runs` shows what runs achieved.

    Args:
        table: show it at all.
        flops: a convention to count TFLOP/s by as well; "": none.
        scaling: how speed grows with nodes, job by job.
        picture: the file to draw that into; "": none.
    """

    table: bool = False
    flops: str = ""
    scaling: bool = False
    picture: str = ""


LIST = TableForm()


def runs(task: TaskContext, job: str, form: TableForm = LIST) -> TaskResult:
    """The task `runs`.

    Args:
        task: how it was called.
        job: only runs of this job; "": all.
        form: how what they achieved is shown.

    Raises:
        ConfigError: forms of a table without one, or an unknown convention.
    """
    flops = form.flops
    if flops and not form.table:
        raise ConfigError("--flops is a column of --table", hint="runs --table --flops CONVENTION")
    if (form.scaling and not form.table) or (form.picture and not form.scaling):
        raise ConfigError(
            "--scaling is a form of --table, and --picture draws it",
            hint="runs --table --scaling --picture FILE",
        )
    refuse_unknown_convention(flops)
    records = current_all(
        list(
            _records(
                run for run in all_runs(load_jobs(task).roots()) if not job or run.job_name == job
            )
        )
    )
    if form.table:
        results = results_of_runs(records, flops, task.say)
        if form.scaling:
            return _show_scaling(task, results, form)
        _print_list(task, results_table(results, flops), empty=not results)
        rows = [result.to_json(flops) for result in results]
        return TaskResult(document("results/1", flops_convention=flops or None, runs=rows))
    _print_list(task, _runs_table(records), empty=not records)
    return TaskResult(document("runs/1", runs=[record.row() for record in records]))


def _show_scaling(task: TaskContext, results: Sequence[RunResult], form: TableForm) -> TaskResult:
    rows = scaling_of(results, form.flops)
    _print_list(task, scaling_table(rows, form.flops), empty=not rows)
    if form.picture:
        draw_scaling(rows, Path(form.picture))
        task.say(f"wrote {form.picture}")
    values = [asdict(row) for row in rows]
    return TaskResult(document("scaling/1", flops_convention=form.flops or None, runs=values))


def _print_list(task: TaskContext, table: Listing, *, empty: bool) -> None:
    if task.json:
        return
    if empty:
        task.say(f"no runs yet; start one: {task.command} train JOB")
    else:
        task.console.print(table)


def _runs_table(records: Iterable[RunRecord]) -> Listing:
    table = Listing(
        "run", "job", "state", "step", "attempt", right=("step", "attempt"), drop=("attempt", "job")
    )
    for record in records:
        colour = COLOURS.get(record.state, "white")
        table.add_row(
            record.run.id,
            record.run.job_name,
            f"[{colour}]{record.state}[/]",
            str(record.step),
            str(record.attempt),
        )
    return table


def _records(found: Iterable[RunFolder]) -> Iterator[RunRecord]:
    """The records of runs. One that cannot be read (of another version, or damaged) gives a
    warning, and the others are listed."""
    for run in found:
        try:
            yield read_run_record(run)
        except ConfigError as error:
            print(f"warning: run {run.id}: {error}", file=sys.stderr, flush=True)


def status(task: TaskContext, run_name: str, *, watch: bool = False) -> TaskResult:
    """The task `status`.

    Args:
        task: how it was called.
        run_name: which run.
        watch: show it again and again until the run has ended; with --json only the end.
    """
    run = find_run(load_jobs(task).roots(), run_name)
    while True:
        record = current(read_run_record(run))
        if record.state == "running":
            view = observe_devices(
                run, "cuda" if read_job(run.job).cluster.device_type == "cuda" else "cpu"
            )
        else:
            view = DeviceUsage([])
        seen = scheduler_of(run).report(record)
        if not task.json:
            if watch and task.console.is_terminal:
                task.console.clear()
            print_status(task, run, record, view)
            if seen is not None:
                task.say(seen.text)
        if not watch or record.state not in ("queued", "starting", "running"):
            return TaskResult(
                {**record.to_json(), **view.to_json(), **(seen.values if seen else {})}
            )
        time.sleep(WATCH_SECONDS)


def _bytes(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 2**30:,.2f} GiB"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}{unit}"


def _gpu_cells(gpu: Gpu | None) -> list[str]:
    if gpu is None:
        return ["?"] * 5
    used = f"{_bytes(gpu.memory_used_bytes)} of {_bytes(gpu.memory_total_bytes)}"
    watts = _figure(gpu.power_watts, " W")
    heat = _figure(gpu.temperature_celsius, " C")
    return [
        escape(f"{gpu.index}: {gpu.name}"),
        _figure(gpu.utilization_percent, "%"),
        used,
        watts,
        heat,
    ]


def devices_table(view: DeviceUsage) -> Listing:
    """A row per rank; with columns about GPUs if a rank has one."""
    gpus = any(rank.gpu for rank in view.ranks)
    headings = ["rank", "pid", "CPU", "threads", "memory"]
    if gpus:
        headings += ["GPU", "busy", "GPU memory", "power", "heat"]
    table = Listing(
        *headings,
        right=("rank", "pid", "CPU", "threads"),
        drop=[name for name in ("heat", "power", "threads", "pid") if name in headings],
    )
    for rank in view.ranks:
        cells = [
            str(rank.rank),
            str(rank.pid),
            f"{rank.cpu_percent:.0f}%",
            str(rank.threads),
            _bytes(rank.resident_bytes),
        ]
        if gpus:
            cells += _gpu_cells(rank.gpu)
        table.add_row(*cells)
    return table


def print_status(task: TaskContext, run: RunFolder, record: RunRecord, view: DeviceUsage) -> None:
    colour = COLOURS.get(record.state, "white")
    iters = read_job(run.job).training.train_iters
    task.console.print(
        f"[bold]{run.id}[/] ({run.job_name}): [{colour}]{record.state}[/], step {record.step} of"
        f" {iters}, attempt {record.attempt}"
    )
    if record.root_cause:
        ending = f"exit {record.exit}"
        if record.failure_class:
            ending += f", class {record.failure_class}"
        task.say(f"{ending}: {record.root_cause.get('message')}")
    for survivor in record.survivors:
        task.say(
            f"left behind: pid {survivor['pid']} ({survivor.get('argv0', '?')}) on"
            f" {survivor['host']}"
        )
    task.console.print(facts_table(run))
    if view.ranks:
        task.console.print(devices_table(view))
    if view.note:
        task.say(view.note)
    print_next(task, record)
