"""The tasks that make runs: build, build-container, prep-data, precompile, rehearse, drill,
diff-engines, train, sweep, resume, attach, cancel."""

from __future__ import annotations

from trainkit.cli.options import FORCE, JOB, RUN, SET, SweepTaskOptions
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task
from trainkit.experiment.options import RehearseOptions, ResumeOptions, TrainOptions


@make_task(help=FORCE, takes_json=True, takes_dry_run=True)
def build(task: TaskContext, force: bool = False) -> TaskResult:
    """Compile the dataset-index helper and the fused kernels if their source changed."""
    from trainkit.cli.run import stages as prepare

    return prepare.build(task, force=force)


@make_task(
    help={
        **JOB,
        "builder": "docker, podman or buildah (default: that of jobs.toml, or the first here)",
        "push": "put the image into the container's registry, by the builder's own credentials",
        **FORCE,
        **SET,
    },
    takes_json=True,
    takes_dry_run=True,
)
def build_container(
    task: TaskContext,
    job: str,
    builder: str = "",
    push: bool = False,
    force: bool = False,
    set: tuple[str, ...] = (),
) -> TaskResult:
    """Build the image that a job's ranks run in, and the file that its runtime starts.

    What it is made of is in the job's [containers.X] table; what is up to date stays.
    """
    from trainkit.cli.run import images

    asked = images.ImageOptions(builder, push, force, set)
    return images.build_container(task, job, asked)


@make_task(
    help={
        "dataset": "a dataset of jobs.toml; its tokenizer is made too",
        "job": "prepare what this job needs",
        "cluster": "with --dataset: write below the root of this cluster (default: this folder)",
        "workers": "number of processes (0: one per core)",
        **FORCE,
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"workers": 0},
)
def prep_data(
    task: TaskContext,
    dataset: str = "",
    job: str = "",
    cluster: str = "",
    workers: int = 0,
    force: bool = False,
) -> TaskResult:
    """Curate and tokenize a dataset (default: that of [defaults].job)."""
    from trainkit.cli.run import stages as prepare
    from trainkit.experiment.prepare import PrepareOptions

    options = PrepareOptions(dataset, job, cluster, workers or None, force, task.dry_run)
    return prepare.prep_data(task, options)


@make_task(options=TrainOptions, help=JOB, takes_json=True, takes_dry_run=True)
def train(task: TaskContext, job: str, options: TrainOptions) -> TaskResult:
    """Prepare what is stale, then train a job and follow it.

    The exit code is the run's. Ctrl-C ends the following, not the run; twice saves and stops it.
    """
    from trainkit.cli.run import train as runner

    return runner.train(task, job, options)


@make_task(options=RehearseOptions, help=JOB, takes_json=True)
def rehearse(task: TaskContext, job: str, options: RehearseOptions) -> TaskResult:
    """Look at a whole job before any node waits for it.

    Data, tokenizer, hosts, container, disk, secrets and stages are checked, and every distinct
    rank is built and takes a step, without GPUs and without the model's memory. The exit code is
    that of the first check that fails.
    """
    from trainkit.cli.run import rehearse as rehearser

    return rehearser.rehearse(task, job, options)


@make_task(
    options=TrainOptions,
    help={**JOB, "html": "write the report of the run that is hurt as one .html file"},
    takes_json=True,
    takes_dry_run=True,
)
def drill(task: TaskContext, job: str, options: TrainOptions, html: str = "") -> TaskResult:
    """Hurt a short run of a job again and again, and see how it goes on.

    Exit 7 where it did not, where its numbers are not those of a run that was left alone, or where
    anything is left of it.
    """
    from trainkit.cli.run import drill as driller

    return driller.drill(task, job, options, html)


@make_task(
    options=TrainOptions,
    help={
        **JOB,
        "engines": "two engines, or jobs that differ in their engine: native,torchtitan",
        "steps": "steps that each makes",
        "tolerance": "how far apart a loss or a gradient norm may be, in parts of it",
        "html": "write both curves as one .html file",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"steps": 1, "tolerance": 0},
)
def diff_engines(
    task: TaskContext,
    job: str,
    options: TrainOptions,
    engines: str = "",
    steps: int = 10,
    tolerance: float = 1e-3,
    html: str = "",
) -> TaskResult:
    """Train a job on two engines for a few steps, and see where their numbers part.

    Both begin with the same weights and read the same samples. Exit 7 where a loss, a gradient norm
    or a tensor at the end is further apart than rounding explains.
    """
    from trainkit.cli.run import diff_engines as differ

    return differ.diff_engines(task, job, options, engines, steps, tolerance, html)


@make_task(
    options=TrainOptions,
    help={
        **JOB,
        "force": "compile again even if all graphs are there",
        "prune": "native: also delete the oldest graphs of other jobs, beyond 20 GiB of all",
    },
    takes_json=True,
    takes_dry_run=True,
)
def precompile(
    task: TaskContext, job: str, options: TrainOptions, force: bool = False, prune: bool = False
) -> TaskResult:
    """Compile the graphs of a job before it trains.

    Engine native: a stage, on one machine, for all ranks. Engine neuronx-nemo: a run of its own on
    as many nodes as the training; success is that no graph failed.
    """
    from trainkit.cli.run import train as runner

    return runner.precompile(task, job, options, force=force, prune=prune)


@make_task(options=SweepTaskOptions, help=JOB, takes_json=True, takes_dry_run=True)
def sweep(task: TaskContext, job: str, options: SweepTaskOptions) -> TaskResult:
    """Train a job with the values of its [jobs.X.sweep], a run for each, and compare them.

    Slurm gets them as one array; elsewhere they run in turn where there is room. The same command
    goes on with a sweep that was interrupted.
    """
    from trainkit.cli.run import sweep as runner

    return runner.sweep(task, job, options)


@make_task(options=ResumeOptions, help=RUN, takes_json=True, takes_dry_run=True)
def resume(task: TaskContext, run: str, options: ResumeOptions) -> TaskResult:
    """Continue a run from its newest valid checkpoint.

    The hosts, and within limits the layout, may be others than before.
    """
    from trainkit.cli.run import train as runner

    return runner.resume(task, run, options)


@make_task(help=RUN, takes_json=True)
def attach(task: TaskContext, run: str) -> TaskResult:
    """Follow a run until it ends, from any terminal.

    The exit code is the run's.
    """
    from trainkit.cli.run import attach as attacher

    return attacher.attach(task, run)


@make_task(
    help={
        **RUN,
        "save": "save a checkpoint first, at the end of the step",
        "force": (
            "if its supervisor is gone, or hangs and is to be killed: count hosts that do not"
            " answer as gone too, so that the run can be resumed"
        ),
    },
    takes_json=True,
)
def cancel(task: TaskContext, run: str, save: bool = False, force: bool = False) -> TaskResult:
    """Stop a run and check every node for leftovers.

    Exit 15, 12 with --save, 13 if a node does not answer.
    """
    from trainkit.cli.run.attach import cancel as run_cancel

    return run_cancel(task, run, save=save, force=force)
