"""The task export: a run's weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Problem
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.inference import warn_of_another_tokenizer
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.runs.record import find_run

if TYPE_CHECKING:
    from trainkit.train.huggingface.writing import TokenizerFile

FORMATS = ("hf",)
DTYPES = ("fp32", "bf16", "fp16")


def export(
    task: TaskContext,
    words: str,
    format: str,
    to: str,
    step: int | None,
    dtype: str,
    shard_gb: float,
) -> TaskResult:
    """The task `export`."""
    problems = []
    if format not in FORMATS:
        problems.append(
            Problem(
                f"--format {format!r} is none of: {', '.join(FORMATS)}",
                hint="hf: a folder that transformers' from_pretrained loads",
            )
        )
    if dtype not in DTYPES:
        problems.append(Problem(f"--dtype {dtype!r} is none of: {', '.join(DTYPES)}"))
    if not to:
        problems.append(
            Problem("--to DIR is missing: the folder to write, which must not be there yet")
        )
    if problems:
        raise ConfigError(problems)
    run = find_run(load_jobs(task).roots(), words)
    job = read_job(run.job)
    from trainkit.train.huggingface.writing import export as write
    from trainkit.train.inference.load import choose_checkpoint

    warn_of_another_tokenizer(run)
    saved = choose_checkpoint(run, step)
    target = Path(to).absolute()
    tokenizer = _tokenizer(job)
    about = {"trainkit_run": run.id, "trainkit_step": str(saved.manifest.step)}
    written = write(
        saved,
        job.model,
        target,
        dtype=dtype,
        shard_bytes=int(shard_gb * 1e9),
        tokenizer=tokenizer,
        about=about,
    )
    task.say(
        f"exported step {saved.manifest.step} of run {run.id} to {target}:"
        f" {written.parameters / 1e6:,.2f} million parameters in {dtype}"
    )
    if tokenizer is None:
        task.say("without a tokenizer: the run was trained on random tokens")
    return TaskResult(
        document(
            "export/1",
            run=run.id,
            step=saved.manifest.step,
            format=format,
            folder=str(target),
            dtype=dtype,
            parameters=written.parameters,
            bytes=written.bytes,
            files=list(written.files),
            tokenizer=tokenizer is not None,
        )
    )


def _tokenizer(job: Job) -> TokenizerFile | None:
    """The tokenizer of the job's dataset; None for random tokens. Raises ConfigError where it is
    gone."""
    from trainkit.train.huggingface.writing import TokenizerFile

    if job.dataset.tokenizer is None:
        return None
    path = DataFolder(Path(job.cluster.root or "."), job.dataset).tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the tokenizer of dataset {job.dataset.name!r} is gone: {path}",
            hint="run prep-data again",
        )
    return TokenizerFile(path, job.dataset.tokenizer.eod_token)
