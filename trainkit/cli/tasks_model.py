"""The tasks about what runs leave: checkpoints, generated text, losses, weights for other
programs."""

from __future__ import annotations

from trainkit.cli.help_texts import RUN
from trainkit.cli.options import ConvertOptions, EvaluateOptions, ExportOptions, GenerateOptions
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(options=GenerateOptions, help=RUN, takes_json=True)
def generate(task: TaskContext, run: str, options: GenerateOptions) -> TaskResult:
    """Generate text with a trained model.

    A text that is longer than the model's context is continued from its last tokens.
    """
    from trainkit.cli.model.generate import generate as run_generate

    return run_generate(task, run, options)


@make_task(options=EvaluateOptions, help=RUN, takes_json=True, takes_dry_run=True)
def evaluate(task: TaskContext, run: str, options: EvaluateOptions) -> TaskResult:
    """Measure loss, perplexity and bits per byte on a dataset."""
    from trainkit.cli.model.evaluate import evaluate as run_evaluate

    return run_evaluate(task, run, options)


@make_task(options=ExportOptions, help=RUN, takes_json=True)
def export(task: TaskContext, run: str, options: ExportOptions) -> TaskResult:
    """Export a run's weights for other programs."""
    from trainkit.cli.model.export import export as run_export

    return run_export(task, run, options)


@make_task(options=ConvertOptions, help=RUN, takes_json=True)
def convert(task: TaskContext, run: str, options: ConvertOptions) -> TaskResult:
    """Convert a run's weights from one engine's format to another's.

    The run may be of engine native, megatron-lm or gpt-neox.
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
    from trainkit.cli.inspect.clean import clean as run_clean

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
