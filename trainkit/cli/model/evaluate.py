"""The task `evaluate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.tokenizer_warning import warn_of_changed_tokenizer
from trainkit.cli.options import EvaluateOptions
from trainkit.cli.run.stages import bring_up_to_date
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Dataset, Job
from trainkit.launch.local_ranks import run_local_ranks
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.find import find_run
from trainkit.stages.build import BuildStage
from trainkit.stages.execute import stamps_folder
from trainkit.stages.prep_data import PrepDataStage, needs_of_dataset

if TYPE_CHECKING:
    import torch

    from trainkit.train.inference.evaluate import Evaluation


@dataclass(frozen=True)
class EvaluationHeader:
    """What is evaluated: the first keys of the document evaluate/1."""

    run: str
    step: int
    dataset: str
    split: str
    device: str
    precision: str


def evaluate(task: TaskContext, run_name: str, options: EvaluateOptions) -> TaskResult:
    """The task `evaluate`."""
    from trainkit.train.inference.evaluate import refuse_unreadable
    from trainkit.train.inference.load import (
        choose_checkpoint,
        choose_device,
        load_own_tokenizer,
        refuse_unsplittable,
    )

    jobs = load_jobs(task)
    run = find_run(jobs.roots(), run_name)
    job = read_job(run.job)
    dataset = job.dataset
    if options.dataset:
        dataset = jobs.dataset(options.dataset)
    refuse_unreadable(dataset, options.split)
    tokenizer, end_of_document = load_own_tokenizer(job)
    device = choose_device(job, options.device)
    refuse_unsplittable(job, options.tensor_parallel, device)
    checkpoint = choose_checkpoint(run, options.step)
    warn_of_changed_tokenizer(run)
    _prepare(task, job, dataset, tokenizer)
    header = EvaluationHeader(
        run.id,
        checkpoint.manifest.step,
        dataset.name,
        options.split,
        device.type,
        job.training.precision,
    )
    if task.dry_run:
        task.say(
            f"would evaluate step {header.step} of run {header.run} on the {header.split} split of"
            f" {header.dataset} on {header.device}"
        )
        return TaskResult(document("evaluate/1", dry_run=True, **asdict(header)))
    measurement = _Measurement(job, checkpoint, dataset, device, tokenizer, end_of_document)
    with _progress_bar(task) as on_progress:
        found = measurement.run(options, on_progress)
    _print_evaluation(task, header, found)
    return TaskResult(document("evaluate/1", dry_run=False, **asdict(header), **asdict(found)))


@dataclass(frozen=True)
class _Measurement:
    """One pass over a split: the model, the data, and where it is computed."""

    job: Job
    checkpoint: Checkpoint
    dataset: Dataset
    device: torch.device
    tokenizer: Tokenizer
    end_of_document: int

    def run(self, options: EvaluateOptions, on_progress: Callable[[int, int], None]) -> Evaluation:
        """Measure in this process, or on several ranks of this machine.

        Args:
            options: which split, how many samples, how many ranks.
            on_progress: called with (samples done, samples in all).
        """
        from trainkit.train.inference import ranks
        from trainkit.train.inference.evaluate import Evaluation, EvaluationFeed
        from trainkit.train.inference.evaluate import evaluate as measure
        from trainkit.train.inference.load import PRECISIONS, load_model, vocabulary

        job = self.job
        # before ranks are started: it may refuse the data
        windows = EvaluationFeed(
            job, self.dataset, options.split, vocabulary(self.checkpoint), self.device
        )
        if options.tensor_parallel == 1:
            precision = PRECISIONS[job.training.precision]
            model = load_model(job, self.checkpoint, self.device, precision)
            return measure(
                model,
                windows,
                self.tokenizer,
                self.end_of_document,
                samples=options.samples,
                progress=on_progress,
            )
        request = ranks.EvaluateRequest(self.dataset, options.split, options.samples)
        spec = ranks.WorkerSpec(job, self.checkpoint.folder, self.device.type, evaluate=request)
        found = run_local_ranks(
            ranks.WORKER_ARGV,
            spec.to_json(),
            options.tensor_parallel,
            self.device.type,
            on_progress,
        )
        return Evaluation(**found)


def _print_evaluation(task: TaskContext, header: EvaluationHeader, found: Evaluation) -> None:
    perplexity = "beyond floating point"
    if found.perplexity is not None:
        perplexity = f"{found.perplexity:,.4f}"
    bits = "n/a"
    if found.bits_per_byte is not None:
        bits = f"{found.bits_per_byte:.4f}"
    task.say(
        f"step {header.step} of run {header.run} on {header.dataset} ({header.split}):"
        f" {found.tokens:,} tokens of {found.samples:,} samples in {found.seconds:.1f} s"
    )
    task.say(
        f"loss {found.loss:.4f} nats/token, perplexity {perplexity}, {bits} bits/byte of"
        f" {found.bytes:,} bytes"
    )


def _prepare(task: TaskContext, job: Job, dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Have `dataset` prepared with the job's own tokenizer. The run's own data is never prepared
    again: its tokenizer would be trained again, too.

    Raises ConfigError for another tokenizer, before a preparation that would only make one.
    """
    from trainkit.train.inference.evaluate import refuse_other_tokenizer

    root = job.cluster.root_folder
    own = DataFolder(root, job.dataset)
    folder = DataFolder(root, dataset)
    if folder.path == own.path:
        return
    assert dataset.tokenizer is not None, "only mock data has none"
    if dataset.tokenizer.type == "file":
        refuse_other_tokenizer(job, tokenizer, dataset, Path(str(dataset.tokenizer.path)))
    elif folder.tokenizer.is_file():
        refuse_other_tokenizer(job, tokenizer, dataset, folder.tokenizer)
    else:
        raise ConfigError(
            f"dataset {dataset.name!r} is not prepared, and its tokenizer"
            f" {dataset.tokenizer.name!r} would be trained on its own text",
            hint=f'give it a tokenizer of type = "file" with path = "{own.tokenizer}"',
        )
    needs = needs_of_dataset(dataset, root, stamps_folder(root, PrepDataStage.name))
    bring_up_to_date(
        task, [*BuildStage().needs(None, stamps_folder(root, BuildStage.name)), *needs], root
    )
    if not task.dry_run:
        refuse_other_tokenizer(job, tokenizer, dataset, folder.tokenizer)


@contextlib.contextmanager
def _progress_bar(task: TaskContext) -> Iterator[Callable[[int, int], None]]:
    """A bar of samples on a terminal; nothing elsewhere."""
    if not task.console.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("[bold]evaluate[/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=task.console, transient=True) as bar:
        row = bar.add_task("", total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total)
