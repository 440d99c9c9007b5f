"""The task `report`."""

from __future__ import annotations

from pathlib import Path

from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.runs import print_status
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.runs.devices import DeviceUsage
from trainkit.runs.find import find_run
from trainkit.runs.loss_plot import draw_losses
from trainkit.runs.record import read_run_record
from trainkit.runs.results import convention_tflops, planned_speed, refuse_unknown_convention
from trainkit.runs.summary import RunSummary, summarize_run


def report(task: TaskContext, run_name: str, picture: str, flops: str) -> TaskResult:
    """The task `report`.

    Args:
        task: how it was called.
        run_name: which run.
        picture: the file to draw the loss curve into; "": none.
        flops: a convention to count TFLOP/s by as well; "": none.
    """
    refuse_unknown_convention(flops)
    run = find_run(load_jobs(task).roots(), run_name)
    if picture:
        draw_losses(run, Path(picture))
        task.say(f"wrote {picture}")
    summary = summarize_run(run)
    by_convention = convention_tflops(summary, flops)
    planned = planned_speed(run)
    if not task.json:
        print_status(task, run, read_run_record(run), DeviceUsage([]))
        _print_speed(task, summary)
        _print_planned(task, summary.tokens_per_second, planned)
        if by_convention is not None:
            task.say(f"{by_convention:.3g} TFLOP/s per device as {flops} counts them")
    found = summary.to_json() | {"planned_tokens_per_second": planned}
    if not flops:
        return TaskResult(found)
    counted = {"flops_convention": flops, "convention_tflops": by_convention}
    return TaskResult(found | counted)


def _print_speed(task: TaskContext, summary: RunSummary) -> None:
    tflops = summary.median("model_tflops")
    if tflops is None:
        return
    mfu = summary.median("mfu")
    share = "MFU n/a"
    if mfu is not None:
        share = f"MFU {100 * mfu:.1f}% of {summary.peak}"
    task.say(f"{tflops:.3g} model TFLOP/s per device (median step), {share}")


def _print_planned(task: TaskContext, measured: float | None, planned: float | None) -> None:
    """The plan's speed beside the run's; nothing where one of them is not known."""
    if measured and planned:
        task.say(
            f"{measured:,.0f} tokens/s; the plan had {planned:,.0f} ({planned / measured - 1:+.1%})"
        )
