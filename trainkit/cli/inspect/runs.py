"""The tasks that follow runs: runs, status, tensorboard, report."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.results_table import results_table
from trainkit.cli.run.summary import facts_table, print_next
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.schedulers import current, current_all, scheduler_of
from trainkit.runs.devices import DeviceUsage, Gpu, observe_devices
from trainkit.runs.find import all_runs, find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.loss_plot import draw_losses
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.results import convention_tflops, refuse_unknown_convention, results_of_runs
from trainkit.runs.summary import summarize_run

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


def runs(task: TaskContext, job: str, *, table: bool = False, flops: str = "") -> TaskResult:
    """The task `runs`. With `table` also what each achieved."""
    if flops and not table:
        raise ConfigError("--flops is a column of --table", hint="runs --table --flops CONVENTION")
    refuse_unknown_convention(flops)
    records = current_all(
        list(
            _records(
                run for run in all_runs(load_jobs(task).roots()) if not job or run.job_name == job
            )
        )
    )
    if table:
        results = results_of_runs(records, flops, task.say)
        if not task.json:
            task.console.print(
                results_table(results, flops)
                if results
                else f"no runs yet; start one: {task.command} train JOB"
            )
        rows = [result.to_json(flops) for result in results]
        return TaskResult(document("results/1", flops_convention=flops or None, runs=rows))
    listed = Listing(
        "run", "job", "state", "step", "attempt", right=("step", "attempt"), drop=("attempt", "job")
    )
    for record in records:
        colour = COLOURS.get(record.state, "white")
        listed.add_row(
            record.run.id,
            record.run.job_name,
            f"[{colour}]{record.state}[/]",
            str(record.step),
            str(record.attempt),
        )
    if not task.json:
        task.console.print(
            listed if records else f"no runs yet; start one: {task.command} train JOB"
        )
    return TaskResult(document("runs/1", runs=[r.row() for r in records]))


def _records(found: Iterable[RunFolder]) -> Iterator[RunRecord]:
    """The records of runs. One that cannot be read (another version's, a damaged file) is said,
    and hides no other."""
    for run in found:
        try:
            yield read_run_record(run)
        except ConfigError as error:
            print(f"warning: run {run.id}: {error}", file=sys.stderr, flush=True)


def status(task: TaskContext, words: str, *, watch: bool = False) -> TaskResult:
    """The task `status`. With `watch` again and again until the run has ended; under --json only
    what is then."""
    run = find_run(load_jobs(task).roots(), words)
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
            _print_status(task, run, record, view)
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
    """A row a rank; columns of GPUs where any was seen."""
    gpus = any(rank.gpu for rank in view.ranks)
    headings = [
        "rank",
        "pid",
        "CPU",
        "threads",
        "memory",
        *(["GPU", "busy", "GPU memory", "power", "heat"] if gpus else []),
    ]
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
        table.add_row(*cells, *(_gpu_cells(rank.gpu) if gpus else []))
    return table


def _print_status(task: TaskContext, run: RunFolder, record: RunRecord, view: DeviceUsage) -> None:
    colour = COLOURS.get(record.state, "white")
    iters = read_job(run.job).training.train_iters
    task.console.print(
        f"[bold]{run.id}[/] ({run.job_name}): [{colour}]{record.state}[/], step {record.step} of"
        f" {iters}, attempt {record.attempt}"
    )
    if record.root_cause:
        if record.failure_class:
            kind = f", class {record.failure_class}"
        else:
            kind = ""
        task.say(f"exit {record.exit}{kind}: {record.root_cause.get('message')}")
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


def tunnel_words(environment: Mapping[str, str], port: int) -> list[str]:
    """The line of ssh that brings a port of this machine to the one that its person sits at.

    This machine's address is the one it was logged in at (SSH_CONNECTION: the client's address
    and port, then ours; ssh(1)), else its name.
    """
    logged_in = environment.get("SSH_CONNECTION", "").split()
    if len(logged_in) == 4:
        host = logged_in[2]
    else:
        host = socket.getfqdn()
    if len(logged_in) == 4 and logged_in[3] != "22":
        at = ["-p", logged_in[3]]
    else:
        at = []
    user = environment.get("USER") or environment.get("LOGNAME")
    return ["ssh", "-N", "-L", f"{port}:localhost:{port}", *at, f"{user}@{host}" if user else host]


def tensorboard(task: TaskContext, words: str, port: int) -> None:
    """The task `tensorboard`: becomes TensorBoard."""
    roots = load_jobs(task).roots()
    where = ["--logdir", str(find_run(roots, words).tensorboard if words else roots[0] / "runs")]
    if not words and len(roots) > 1:
        where = ["--logdir_spec", ",".join(f"{root.name}:{root / 'runs'}" for root in roots)]
    argv = [
        sys.executable,
        "-m",
        "tensorboard.main",
        *where,
        "--port",
        str(port),
        "--host",
        "localhost",
    ]
    if task.dry_run:
        task.say(" ".join(argv))
    if task.dry_run or os.environ.get("SSH_CONNECTION"):
        task.say(f"from your own machine: {shlex.join(tunnel_words(os.environ, port))}")
        task.say(f"  and there in a browser: http://localhost:{port}")
    if task.dry_run:
        return
    os.execv(sys.executable, argv)


def report(task: TaskContext, words: str, picture: str, flops: str) -> TaskResult:
    """The task `report`."""
    refuse_unknown_convention(flops)
    run = find_run(load_jobs(task).roots(), words)
    if picture:
        draw_losses(run, Path(picture))
        task.say(f"drew {picture}")
    summary = summarize_run(run)
    if flops:
        counted = {
            "flops_convention": flops,
            "convention_tflops": convention_tflops(summary, flops),
        }
    else:
        counted = {}
    if not task.json:
        _print_status(task, run, read_run_record(run), DeviceUsage([]))
        if (tflops := summary.median("model_tflops")) is not None:
            mfu = summary.median("mfu")
            if mfu is None:
                used = "MFU n/a"
            else:
                used = f"MFU {100 * mfu:.1f}% of {summary.peak}"
            task.say(f"{tflops:.3g} model TFLOP/s per device (median step), {used}")
        if counted.get("convention_tflops") is not None:
            task.say(
                f"{counted['convention_tflops']:.3g} TFLOP/s per device as {flops} counts them"
            )
    return TaskResult({**summary.to_json(), **counted})
