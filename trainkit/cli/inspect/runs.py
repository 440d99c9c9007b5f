"""The tasks `runs` and `status`. `runs --table` has the columns of published results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.summary import facts_table, next_page
from trainkit.cli.tables import Listing, Page, gib, marked
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_registry import current, current_all, scheduler_of
from trainkit.reports.faults import build_faults, faults_in_words
from trainkit.reports.read import read_run_times
from trainkit.reports.scaling import ScalingRow, draw_scaling, scaling_of
from trainkit.runs.devices import DeviceUsage, Gpu, observe_devices
from trainkit.runs.evaluations import evaluations_in_words, read_evaluations
from trainkit.runs.expert_loads import dead_in_words, dropped_in_words, loads_now, read_expert_loads
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.slow_rank import slow_rank
from trainkit.runs.summary import RunResult, refuse_unknown_convention, results_of_runs

FIRST = ("run", "job")
NUMBERS = (
    "nodes",
    "ranks",
    "TP x PP x DP",
    "micro",
    "global",
    "s/step",
    "tokens/s",
    "TFLOP/s a device",
    "MFU",
    "memory a rank",
)
PLANNED = "planned tokens/s"
CONVENTION_AT = NUMBERS.index("MFU")


def results_table(results: Sequence[RunResult], convention: str) -> Listing:
    """One row per run; "-" where nothing was logged.

    Args:
        results: the runs.
        convention: adds a column of TFLOP/s by it; "" for none.
    """
    by_convention = [f"TFLOP/s ({convention})"] if convention else []
    numbers = [*NUMBERS[:CONVENTION_AT], *by_convention, *NUMBERS[CONVENTION_AT:]]
    planned = any(result.planned_tokens_per_second for result in results)
    if planned:
        numbers.insert(numbers.index("tokens/s") + 1, PLANNED)
    drop = [PLANNED] if planned else []
    drop += ["micro", "global", "nodes", "TP x PP x DP", "memory a rank", "s/step", *by_convention]
    table = Listing(*FIRST, *numbers, right=numbers, drop=[*drop, "job", "MFU", "ranks"])
    for result in results:
        cells = [
            str(result.nodes),
            str(result.ranks),
            f"{result.tensor} x {result.pipeline} x {result.data}",
            str(result.micro_batch_size),
            _number(result.global_batch_size, ","),
            _number(result.seconds_per_step, ".3g"),
            _number(result.tokens_per_second, ",.0f"),
        ]
        if planned:
            cells.append(_planned(result))
        cells.append(_number(result.model_tflops, ".4g"))
        if convention:
            cells.append(_number(result.convention_tflops, ".4g"))
        cells += [_number(result.mfu, ".1%"), gib(result.peak_bytes, 2)]
        table.add_row(escape(result.run), escape(result.job), *cells)
    return table


def scaling_table(rows: Sequence[ScalingRow], convention: str) -> Listing:
    """How speed grows with nodes, a row a run.

    Args:
        rows: of `scaling_of`.
        convention: by which their TFLOP/s are counted; "": trainkit's own.
    """
    tflops = f"TFLOP/s a device ({convention})" if convention else "TFLOP/s a device"
    numbers = ("nodes", "devices", "batch", "samples/s", tflops, "speed-up", "efficiency")
    table = Listing("job", *numbers, "run", right=numbers, drop=("run", "devices"))
    for row in rows:
        cells = [
            str(row.nodes),
            str(row.ranks),
            _number(row.global_batch_size, ","),
            _number(row.samples_per_second, ",.4g"),
            _number(row.tflops, ".4g"),
            f"{row.speedup:.2f}x",
            f"{row.efficiency:.1%}",
        ]
        table.add_row(escape(row.job), *cells, escape(row.run))
    return table


def _planned(result: RunResult) -> str:
    """What the plan had said, and by how much it was wrong."""
    said = result.planned_tokens_per_second
    if said is None:
        return "-"
    if not result.tokens_per_second:
        return f"{said:,.0f}"
    return f"{said:,.0f} ({said / result.tokens_per_second - 1:+.1%})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


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
    found = [run for run in all_runs(load_jobs(task).roots()) if not job or run.job_name == job]
    records = current_all(list(readable_records(found)))
    if form.table:
        results = results_of_runs(records, flops, task.say)
        if form.scaling:
            return _scaling(task, results, form)
        rows = [result.to_json(flops) for result in results]
        return TaskResult(
            document("results/1", flops_convention=flops or None, runs=rows),
            page=_list_page(task, results_table(results, flops)),
        )
    return TaskResult(
        document("runs/1", runs=[record.row() for record in records]),
        page=_list_page(task, _runs_table(records)),
    )


def _scaling(task: TaskContext, results: Sequence[RunResult], form: TableForm) -> TaskResult:
    rows = scaling_of(results, form.flops)
    if form.picture:
        draw_scaling(rows, Path(form.picture))
        task.say(f"wrote {form.picture}")
    values = [asdict(row) for row in rows]
    return TaskResult(
        document("scaling/1", flops_convention=form.flops or None, runs=values),
        page=_list_page(task, scaling_table(rows, form.flops)),
    )


def _list_page(task: TaskContext, table: Listing) -> Page:
    return [table] if table.rows else [f"no runs yet; start one: {task.command} train JOB"]


def _runs_table(records: Iterable[RunRecord]) -> Listing:
    return Listing(
        "run",
        "job",
        "state",
        "step",
        "attempt",
        right=("step", "attempt"),
        drop=("attempt", "job"),
        rows=(
            (
                record.run.id,
                record.run.job_name,
                _state_cell(record),
                str(record.step),
                str(record.attempt),
            )
            for record in records
        ),
    )


def _state_cell(record: RunRecord) -> str:
    return f"[{COLOURS.get(record.state, 'white')}]{record.state}[/]"


def readable_records(found: Iterable[RunFolder]) -> Iterator[RunRecord]:
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
        view = DeviceUsage([])
        if record.state == "running":
            cuda = read_job(run.job).cluster.device_type == "cuda"
            view = observe_devices(run, "cuda" if cuda else "cpu")
        seen = scheduler_of(run).report(record)
        if not task.json:
            if watch and task.console.is_terminal:
                task.console.clear()
            task.show(status_page(task, record, view))
            if seen is not None:
                task.say(seen.text)
        if not watch or record.state not in ("queued", "starting", "running"):
            loads = loads_now(read_expert_loads(run))
            experts = {"experts": loads.to_json()} if loads is not None else {}
            slow = slow_rank(run)
            experts |= {"slow_rank": asdict(slow)} if slow else {}
            made = [each.to_json() for each in read_evaluations(run)]
            values = {**(seen.values if seen else {}), **({"evaluations": made} if made else {})}
            return TaskResult({**record.to_json(), **view.to_json(), **values, **experts})
        time.sleep(WATCH_SECONDS)


def _figure(value: float | None, unit: str) -> str:
    return "?" if value is None else f"{value:.0f}{unit}"


def _gpu_cells(gpu: Gpu | None) -> list[str]:
    if gpu is None:
        return ["?"] * 5
    used = " of ".join(
        gib(size, 2, "?") for size in (gpu.memory_used_bytes, gpu.memory_total_bytes)
    )
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
            gib(rank.resident_bytes, 2, "?"),
        ]
        if gpus:
            cells += _gpu_cells(rank.gpu)
        table.add_row(*cells)
    return table


def status_page(task: TaskContext, record: RunRecord, view: DeviceUsage) -> Page:
    """A run's state, why it ended, its numbers, what its ranks use, and what to try next."""
    run = record.run
    job = read_job(run.job)
    yield marked(
        f"[bold]{run.id}[/] ({run.job_name}): {_state_cell(record)}, step {record.step} of"
        f" {job.training.train_iters}, attempt {record.attempt}"
    )
    if record.root_cause:
        kind = f", class {record.failure_class}" if record.failure_class else ""
        yield f"exit {record.exit}{kind}: {record.root_cause.get('message')}"
    for survivor in record.survivors:
        yield (
            f"left behind: pid {survivor['pid']} ({survivor.get('argv0', '?')}) on"
            f" {survivor['host']}"
        )
    yield facts_table(run)
    if evaluations := evaluations_in_words(run, job):
        yield f"evaluations: {escape(evaluations)}"
    if slow := slow_rank(run):
        way_out = f"nodes --cluster {job.cluster.name} --leave-out {slow.host}"
        by_hand = job.cluster.launcher_traits.hostfile and job.nodes > 1
        yield slow.in_words() + (f" ({task.command} {way_out})" if by_hand else "")
    loads = loads_now(read_expert_loads(run))
    if loads is not None:
        yield from filter(None, (dead_in_words(loads), dropped_in_words(loads)))
    yield from faults_in_words(build_faults(read_run_times(record)))
    if view.ranks:
        yield devices_table(view)
    if view.note:
        yield view.note
    yield from next_page(task, record)
