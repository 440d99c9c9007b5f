"""The tasks about runs that are there: runs, status, why, logs, tensorboard, report, compare,
scaling-law, board; and about what they leave: checkpoints, generated text, losses, weights for
other programs."""

from __future__ import annotations

from trainkit.cli.options import (
    FLOPS,
    PICTURE,
    RUN,
    ConvertOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    LogOptions,
)
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(options=GenerateOptions, help=RUN, takes_json=True)
def generate(task: TaskContext, run: str, options: GenerateOptions) -> TaskResult:
    """Generate text with a trained model.

    A text that is longer than the model's context is continued from its last tokens.
    """
    from trainkit.cli.model.evaluate import generate as run_generate

    return run_generate(task, run, options)


@make_task(options=EvaluateOptions, help=RUN, takes_json=True, takes_dry_run=True)
def evaluate(task: TaskContext, run: str, options: EvaluateOptions) -> TaskResult:
    """Measure loss, perplexity and bits per byte on a dataset."""
    from trainkit.cli.model.evaluate import evaluate as run_evaluate

    return run_evaluate(task, run, options)


@make_task(
    help={**RUN, "last": "number of newest checkpoints to average"},
    takes_json=True,
    minimum={"last": 2},
)
def average(task: TaskContext, run: str, last: int = 5) -> TaskResult:
    """Average the weights of a run's last checkpoints.

    `--weights average` evaluates, generates with and exports the mean.
    """
    from trainkit.cli.model.convert import average as run_average

    return run_average(task, run, last)


@make_task(options=ExportOptions, help=RUN, takes_json=True)
def export(task: TaskContext, run: str, options: ExportOptions) -> TaskResult:
    """Export a run's weights for other programs."""
    from trainkit.cli.model.convert import export as run_export

    return run_export(task, run, options)


@make_task(options=ConvertOptions, help=RUN, takes_json=True)
def convert(task: TaskContext, run: str, options: ConvertOptions) -> TaskResult:
    """Convert a run's weights from one engine's format to another's.

    The run may be of engine native, megatron-lm, gpt-neox or torchtitan.
    """
    from trainkit.cli.model.convert import convert as run_convert

    return run_convert(task, run, options)


@make_task(
    help={
        **RUN,
        "verify": "read every file and compare its checksum",
        "pin": "never delete the checkpoint of this step",
        "unpin": "allow the checkpoint of this step to be deleted again",
    },
    takes_json=True,
    minimum={"pin": 0, "unpin": 0},
)
def checkpoints(
    task: TaskContext,
    run: str,
    verify: bool = False,
    pin: int | None = None,
    unpin: int | None = None,
) -> TaskResult:
    """List checkpoints: size, layout, integrity, why they are kept.

    Exit 16 if there are checkpoints and all are damaged.
    """
    from trainkit.cli.inspect.checkpoints import checkpoints as show

    return show(task, run, hashes=verify, pinned=pin, unpinned=unpin)


@make_task(
    help={
        "run": "only this run",
        "keep": "number of a run's newest checkpoints to keep, besides those that its job keeps",
        "damaged": "include checkpoints that were set aside as damaged",
        "perform": "delete them instead of listing them",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"keep": 1},
)
def clean(
    task: TaskContext, run: str = "", keep: int = 1, damaged: bool = False, perform: bool = False
) -> TaskResult:
    """List or delete checkpoints that ended runs no longer need."""
    from trainkit.cli.inspect.checkpoints import clean as run_clean

    return run_clean(task, run, keep, damaged=damaged, perform=perform)


@make_task(
    help={**RUN, "step": "the training step", "samples": "number of samples to show (0: all)"},
    takes_json=True,
    minimum={"step": 1, "samples": 0},
)
def replay(task: TaskContext, run: str, step: int = 1, samples: int = 4) -> TaskResult:
    """Rebuild the batch of a training step and show it as text.

    Exit 6 if the data has changed since.
    """
    from trainkit.cli.inspect.replay import replay as show

    return show(task, run, step, samples)


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
    from trainkit.cli.inspect.runs import TableForm, runs as run

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
    from trainkit.cli.inspect.logs import why as explain

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
    from trainkit.cli.inspect.report import ReportFiles, report as show

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
    from trainkit.cli.inspect.report import compare as show

    return show(task, [run, other, *also], html)


@make_task(
    help={
        "runs": "a job whose sweep they are, or runs with a , between",
        "predict": "N,D: say the loss of so many parameters and tokens; may be repeated",
        "write": "file of the law, which scale --law reads",
        "picture": PICTURE.format("loss against cost"),
    },
    takes_json=True,
)
def scaling_law(
    task: TaskContext,
    runs: str,
    predict: tuple[str, ...] = (),
    write: str = "scaling-law.json",
    picture: str = "",
) -> TaskResult:
    """Fit the loss of finished runs over parameters and tokens.

    L(N, D) = E + A / N^alpha + B / D^beta with bootstrap intervals, and parabolas where runs have
    equal budgets (Hoffmann et al. 2022, approaches 3 and 2).
    """
    from trainkit.cli.inspect.scaling_law import LawForms, scaling_law as show

    return show(task, runs, LawForms(predict, write, picture))


@make_task(help={"port": "port to listen on, for this machine alone (0: any that is free)"})
def board(task: TaskContext, port: int = 6007) -> None:
    """Show all runs on one live page, with the report of each, in a browser."""
    from trainkit.cli.inspect.tensorboard import board as show

    show(task, port)
