"""The tasks that look at runs: runs, status, why, logs, tensorboard, report,
compare, board."""

from __future__ import annotations

from trainkit.cli.help_texts import FLOPS, PICTURE, RUN
from trainkit.cli.options import LogOptions
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "job": "only runs of this job",
        "table": (
            "show what each achieved: nodes, tokens/s, TFLOP/s per device (medians), memory per"
            " rank"
        ),
        "flops": f"with --table: {FLOPS}",
        "scaling": "with --table: how the speed of each job grows with its nodes",
        "picture": f"with --scaling: {PICTURE.format('it')}",
    },
    takes_json=True,
)
def runs(
    task: TaskContext,
    job: str = "",
    table: bool = False,
    flops: str = "",
    scaling: bool = False,
    picture: str = "",
) -> TaskResult:
    """List runs, oldest first."""
    from trainkit.cli.inspect.runs import TableForm
    from trainkit.cli.inspect.runs import runs as run

    return run(task, job, TableForm(table, flops, scaling, picture))


@make_task(
    help={**RUN, "watch": "show it again every two seconds until the run has ended"},
    takes_json=True,
)
def status(task: TaskContext, run: str, watch: bool = False) -> TaskResult:
    """Show how a run is doing, or how it ended, and what to do next."""
    from trainkit.cli.inspect.runs import status as show

    return show(task, run, watch=watch)


@make_task(
    help={**RUN, "attempt": "explain this attempt (0: the newest that failed)"},
    takes_json=True,
    minimum={"attempt": 0},
)
def why(task: TaskContext, run: str, attempt: int = 0) -> TaskResult:
    """Show which rank failed first, why, and what to do about it."""
    from trainkit.cli.inspect.why import why as explain

    return explain(task, run, attempt)


@make_task(options=LogOptions, help=RUN, takes_json=True)
def logs(task: TaskContext, run: str, options: LogOptions) -> TaskResult:
    """Print the logs of ranks (default: rank 0)."""
    from trainkit.cli.inspect.logs import logs as show

    return show(task, run, options)


@make_task(
    help={"run": "only this run", "port": "port to listen on"},
    takes_dry_run=True,
)
def tensorboard(task: TaskContext, run: str = "", port: int = 6006) -> None:
    """Open TensorBoard for all runs."""
    from trainkit.cli.inspect.tensorboard import tensorboard as open_tensorboard

    open_tensorboard(task, run, port)


@make_task(
    help={
        **RUN,
        "html": "write the whole report as one .html file, which asks nobody for anything",
        "png": "draw the whole report as a .png file (needs the extra `report`)",
        "picture": PICTURE.format("the loss curve"),
        "flops": FLOPS,
        "samples": "first have each checkpoint that is there go on from the job's generate.prompts",
    },
    takes_json=True,
)
def report(
    task: TaskContext,
    run: str,
    html: str = "",
    png: str = "",
    picture: str = "",
    flops: str = "",
    samples: bool = False,
) -> TaskResult:
    """Summarize a run: losses, speed, attempts, where its time went and its files are."""
    from trainkit.cli.inspect.report import ReportFiles
    from trainkit.cli.inspect.report import report as show

    return show(task, run, ReportFiles(picture, html, png, samples), flops)


@make_task(
    help={
        **RUN,
        "other": "the run to compare it with, in the same words",
        "also": "one more run; may be repeated",
        "html": "write the comparison as one .html file, which asks nobody for anything",
    },
    takes_json=True,
)
def compare(
    task: TaskContext, run: str, other: str, also: tuple[str, ...] = (), html: str = ""
) -> TaskResult:
    """Compare runs: what differs in configuration, code and versions, and where losses part."""
    from trainkit.cli.inspect.compare import compare as show

    return show(task, [run, other, *also], html)


@make_task(help={"port": "port to listen on, for this machine alone (0: any that is free)"})
def board(task: TaskContext, port: int = 6007) -> None:
    """Show all runs on one live page, with the report of each, in a browser."""
    from trainkit.cli.inspect.board import board as show

    show(task, port)
