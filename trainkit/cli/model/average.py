"""The task `average`: the mean of a run's last checkpoints."""

from __future__ import annotations

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.runs.checkpoints import checkpoint_folder, published_folders, step_of
from trainkit.runs.find import find_run


def average(task: TaskContext, run_name: str, last: int) -> TaskResult:
    """The task. Raises ConfigError where there are too few checkpoints, or the same average is
    there; TrainkitError for a damaged checkpoint."""
    run = find_run(load_jobs(task).roots(), run_name)
    from trainkit.train.inference.averages import write_average
    from trainkit.train.inference.load import choose_checkpoint

    steps = [step_of(folder) for folder in published_folders(run.checkpoints)][-last:]
    if 0 < len(steps) < last:
        raise ConfigError(
            f"--last {last}: run {run.id} has {len(steps)} checkpoints",
            hint="checkpoint.keep_last says how many are kept, training.save_interval how often"
            " one is written",
        )
    chosen = [choose_checkpoint(run, step) for step in steps] or [choose_checkpoint(run)]
    folder = checkpoint_folder(run.averages, steps[-1])
    if folder.exists():
        raise ConfigError(
            f"there is an average up to step {steps[-1]} already: {folder}",
            hint="remove that folder to make another",
        )
    saved = write_average(run.averages, chosen)
    task.say(
        f"averaged steps {', '.join(map(str, steps))} of run {run.id}: {saved.folder}; read it by"
        " --weights average"
    )
    return TaskResult(
        document("average/1", run=run.id, steps=steps, folder=str(saved.folder)),
    )
