"""The tasks that look at runs: runs, status, why, logs, tensorboard, report."""

from __future__ import annotations

from trainkit.cli.help_texts import RUN
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "job": "only this job's",
        "table": (
            "what each achieved: nodes, tokens/s, TFLOP/s of a device (medians), memory of a rank"
        ),
        "flops": (
            "in the table also TFLOP/s as others count them: megatron-2021, palm-6n or"
            " gpt-neox-2022"
        ),
    },
    takes_json=True,
)
def runs(task: TaskContext, job: str = "", table: bool = False, flops: str = "") -> TaskResult:
    """List runs, oldest first."""
    from trainkit.cli.inspect import runs as follow

    return follow.runs(task, job, table=table, flops=flops)


@make_task(
    positional=["run"],
    help={**RUN, "watch": "again every two seconds, until the run has ended"},
    takes_json=True,
)
def status(task: TaskContext, run: str, watch: bool = False) -> TaskResult:
    """Say how a run is doing, or how it ended and what to do next."""
    from trainkit.cli.inspect import runs as follow

    return follow.status(task, run, watch=watch)


@make_task(
    positional=["run"],
    help={**RUN, "attempt": "of this attempt; 0: the newest that failed"},
    takes_json=True,
    minimum={"attempt": 0},
)
def why(task: TaskContext, run: str, attempt: int = 0) -> TaskResult:
    """Say which rank failed first, on which host, how, and what to do about it."""
    from trainkit.cli.inspect import why as asker

    return asker.why(task, run, attempt)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "rank": "whose log: 3, or 0,8-15, or failed",
        "node": "of the ranks on this host",
        "attempt": "which attempt; 0: the newest",
        "follow": "go on printing until the run ends",
        "lines": "how many of the last lines; 0: all",
    },
    takes_json=True,
    minimum={"attempt": 0, "lines": 0},
)
def logs(
    task: TaskContext,
    run: str,
    rank: str = "",
    node: str = "",
    attempt: int = 0,
    follow: bool = False,
    lines: int = 50,
) -> TaskResult:
    """Print the logs of ranks; by default that of rank 0."""
    from trainkit.cli.inspect import logs as reader

    return reader.logs(task, run, rank, node, attempt, follow=follow, lines=lines)


@make_task(help={"run": "only this run", "port": "the port to listen on"}, takes_dry_run=True)
def tensorboard(task: TaskContext, run: str = "", port: int = 6006) -> None:
    """Open TensorBoard over all runs."""
    from trainkit.cli.inspect import runs as follow

    follow.tensorboard(task, run, port)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "picture": "also draw the loss curve into this .svg or .png (needs the extra `report`)",
        "flops": "also TFLOP/s as others count them: megatron-2021, palm-6n or gpt-neox-2022",
    },
    takes_json=True,
)
def report(task: TaskContext, run: str, picture: str = "", flops: str = "") -> TaskResult:
    """Sum a run up: losses, speed, attempts, where everything lies."""
    from trainkit.cli.inspect import runs as follow

    return follow.report(task, run, picture, flops)
