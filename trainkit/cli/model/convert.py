"""The tasks `export`, `convert` and `average`: a run's weights for other programs, in another
engine's format, or the mean of its last checkpoints."""

from __future__ import annotations

from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.evaluate import warn_of_changed_tokenizer
from trainkit.cli.options import ConvertOptions, ExportOptions
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.preparation import term_interrupts
from trainkit.runs.checkpoints import checkpoint_folder, published_folders, step_of
from trainkit.runs.find import find_run


def average(task: TaskContext, run_name: str, last: int) -> TaskResult:
    """The task `average`. Raises ConfigError where there are too few checkpoints, or the same
    average is there; TrainkitError for a damaged checkpoint."""
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


FORMATS = ("hf",)
DTYPES = ("fp32", "bf16", "fp16")


@term_interrupts()
def export(task: TaskContext, run_name: str, options: ExportOptions) -> TaskResult:
    """The task `export`. Raises ConfigError for options that are not valid."""
    _refuse_invalid_export(options)
    run = find_run(load_jobs(task).roots(), run_name)
    job = read_job(run.job)
    from trainkit.train.huggingface.weights import CheckpointWeights
    from trainkit.train.huggingface.writing import export as write, tokenizer_of
    from trainkit.train.inference.load import choose_checkpoint

    warn_of_changed_tokenizer(run)
    checkpoint = choose_checkpoint(run, options.step, options.weights)
    step = checkpoint.manifest.step
    folder = Path(options.to).absolute()
    tokenizer = tokenizer_of(job)
    written = write(
        CheckpointWeights(checkpoint, job.model),
        job.model,
        folder,
        dtype=options.dtype,
        shard_bytes=int(options.shard_gb * 1e9),
        tokenizer=tokenizer,
        about={"trainkit_run": run.id, "trainkit_step": str(step)},
    )
    task.say(
        f"exported step {step} of run {run.id} to {folder}: {written.parameters / 1e6:,.2f} million"
        f" parameters in {options.dtype}"
    )
    if tokenizer is None:
        task.say("without a tokenizer: the run was trained on random tokens")
    return TaskResult(
        document(
            "export/1",
            run=run.id,
            step=step,
            format=options.format,
            folder=str(folder),
            dtype=options.dtype,
            parameters=written.parameters,
            bytes=written.bytes,
            files=list(written.files),
            tokenizer=tokenizer is not None,
        )
    )


def _refuse_invalid_export(options: ExportOptions) -> None:
    problems = []
    if options.format not in FORMATS:
        problems.append(
            Problem(
                f"--format {options.format!r} is not one of: {', '.join(FORMATS)}",
                hint="hf: a folder that transformers' from_pretrained loads",
            )
        )
    if options.dtype not in DTYPES:
        problems.append(Problem(f"--dtype {options.dtype!r} is not one of: {', '.join(DTYPES)}"))
    if not options.to:
        problems.append(Problem("--to DIR is missing: the folder to write, which must not exist"))
    raise_problems(problems)


TARGETS = ("hf", "megatron-lm", "gpt-neox")


@term_interrupts()
def convert(task: TaskContext, run_name: str, options: ConvertOptions) -> TaskResult:
    """The task `convert`. Raises ConfigError for options that are not valid."""
    _refuse_invalid(options)
    run = find_run(load_jobs(task).roots(), run_name)
    job = read_job(run.job)
    from trainkit.engines.convert import formats
    from trainkit.engines.convert.files import refuse_occupied
    from trainkit.engines.convert.options import FileLayout
    from trainkit.train.huggingface import weights
    from trainkit.train.huggingface.writing import tokenizer_of

    folder = Path(options.out).absolute()
    refuse_occupied(folder)
    warn_of_changed_tokenizer(run)
    source = formats.open_run(run, job, options.step)
    tokenizer = tokenizer_of(job) if options.to == formats.HUGGING_FACE else None
    written = formats.convert(
        source,
        options.to,
        FileLayout(
            tensor=options.tensor_parallel_size,
            pipeline=options.pipeline_parallel_size,
            names=options.names,
            dtype=weights.TARGETS[options.dtype],
            divisor=job.model.make_vocab_size_divisible_by,
            expert=options.expert_parallel_size,
        ),
        folder,
        formats.HuggingFaceExtras(
            shard_bytes=int(options.shard_gb * 1e9),
            tokenizer=tokenizer,
            about={"trainkit_run": run.id, "trainkit_step": str(source.step)},
        ),
    )
    task.say(
        f"converted step {source.step} of run {run.id} ({job.engine}) to {options.to} in {folder}:"
        f" {written.parameters / 1e6:,.2f} million parameters in {options.dtype}"
    )
    for note in source.notes:
        task.say(f"note: {note}")
    if options.to in formats.ENGINE_FORMATS:
        task.say(formats.ENGINE_FORMATS[options.to].use.format(folder=folder))
    return TaskResult(
        document(
            "convert/1",
            run=run.id,
            engine=job.engine,
            step=source.step,
            to=options.to,
            folder=str(folder),
            dtype=options.dtype,
            parameters=written.parameters,
            bytes=written.bytes,
            files=list(written.files),
            notes=list(source.notes),
        )
    )


def _refuse_invalid(options: ConvertOptions) -> None:
    problems = []
    if options.to not in TARGETS:
        problems.append(
            Problem(
                f"--to {options.to!r} is not one of: {', '.join(TARGETS)}",
                hint="hf: a folder that transformers loads, and that init_from begins with",
            )
        )
    if options.dtype not in DTYPES:
        problems.append(Problem(f"--dtype {options.dtype!r} is not one of: {', '.join(DTYPES)}"))
    if not options.out:
        problems.append(Problem("--out DIR is missing: the folder to write, new or empty"))
    cut = (options.tensor_parallel_size, options.pipeline_parallel_size, options.names)
    if options.to != "megatron-lm" and options.expert_parallel_size != 1:
        problems.append(Problem("--expert-parallel-size is for megatron-lm"))
    if options.to == "hf" and cut != (1, 1, ""):
        problems.append(
            Problem(
                "--tensor-parallel-size, --pipeline-parallel-size and --names are for megatron-lm"
                " and gpt-neox; a Hugging Face folder is whole"
            )
        )
    raise_problems(problems)
