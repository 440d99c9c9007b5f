"""The tasks `evaluate` and `generate`, with prompts from the command line or a file."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.locks import LockBusy
from trainkit.base.printable import warn
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import EvaluateOptions, GenerateOptions
from trainkit.cli.run.stages import bring_up_to_date
from trainkit.cli.tables import Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Dataset, Job
from trainkit.launch.local_ranks import run_local_ranks
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.evaluations import evaluations_in_words, read_evaluations
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.stages.build import BuildStage
from trainkit.stages.execute import stamps_folder
from trainkit.stages.prep_data import PrepDataStage, needs_of_dataset
from trainkit.stages.stamps import file_identity

if TYPE_CHECKING:
    import torch

    from trainkit.train.inference.evaluate import Evaluation


def warn_of_changed_tokenizer(run: RunFolder) -> None:
    """Warn on stderr if the run's tokenizer.json is not the file that the run began with: its ids
    may stand for other text now."""
    inputs = run.inputs
    if not inputs.is_file():  # a run folder made by hand
        return
    for identity in read_document(inputs, "inputs/1")["files"]:
        path = Path(identity[0])
        if path.name == "tokenizer.json" and path.is_file() and file_identity(path) != identity:
            warn(
                f"{path} has changed since run {run.id} began; if its ids stand for other"
                " text now, what follows is nonsense"
            )


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a line is a JSON string, or a JSON object whose key "prompt" holds one.
    Empty lines are ignored.

    Raises ConfigError for the first line that is neither, and for a file without prompts.
    OSError as reading does.
    """
    prompts = []
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            prompt = None
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{path}:{number}: neither a JSON string nor {{"prompt": "..."}}: {line[:60]}',
                hint="plain text to JSON lines: jq -R .",
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def generate(task: TaskContext, run_name: str, options: GenerateOptions) -> TaskResult:
    """The task `generate`: one text per prompt."""
    from trainkit.train.decoding.sampling import Sampling
    from trainkit.train.inference.generate import generate as continue_prompts

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    prompts = list(options.prompt)
    if options.prompts_file:
        prompts += read_prompts(Path(options.prompts_file))
    run = find_run(load_jobs(task).roots(), run_name)
    warn_of_changed_tokenizer(run)
    step, generations = continue_prompts(
        run,
        prompts or [""],
        sampling,
        max_new_tokens=options.max_new_tokens,
        step=options.step,
        weights=options.weights,
        device=options.device,
        split=(options.tensor_parallel, run_local_ranks),
    )
    first = generations[0]
    return TaskResult(
        document(
            "generate/1",
            run=run.id,
            step=step,
            prompt=first.prompt,
            text=first.text,
            generations=[asdict(generation) for generation in generations],
        ),
        page=_page([generation.text for generation in generations]),
    )


def _page(texts: Sequence[str]) -> Page:
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            yield f"--- {number} of {len(texts)}"
        yield text


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
    if options.pending:
        return _make_pending(task, run, job)
    dataset = jobs.dataset(options.dataset) if options.dataset else job.dataset
    refuse_unreadable(dataset, options.split)
    own = load_own_tokenizer(job)
    device = choose_device(job, options.device)
    refuse_unsplittable(job, options.tensor_parallel, device)
    checkpoint = choose_checkpoint(run, options.step, options.weights)
    warn_of_changed_tokenizer(run)
    _prepare(task, job, dataset, own[0])
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
    with _progress_bar(task) as on_progress:
        found = _measure(job, checkpoint, dataset, device, own, options, on_progress)
    _print_evaluation(task, header, found)
    return TaskResult(document("evaluate/1", dry_run=False, **asdict(header), **asdict(found)))


def _make_pending(task: TaskContext, run: RunFolder, job: Job) -> TaskResult:
    """Make the job's evaluations that have no scores. Raises TrainkitError (exit 17): the run's
    supervisor makes them."""
    from trainkit.launch.supervise.evaluations import evaluate_checkpoints

    if not task.dry_run:
        try:
            asyncio.run(evaluate_checkpoints(run, job, lambda: True, task.say))
        except LockBusy as error:
            raise TrainkitError(
                f"evaluations of run {run.id} are being made: {error}", exit=Exit.HOSTS_BUSY
            ) from None
    page = evaluations_in_words(run, job) or "no evaluation is due"
    made = [each.to_json() for each in read_evaluations(run)]
    return TaskResult(document("evaluations/1", run=run.id, evaluations=made), page=[page])


def _measure(
    job: Job,
    checkpoint: Checkpoint,
    dataset: Dataset,
    device: torch.device,
    own: tuple[Tokenizer, int],
    options: EvaluateOptions,
    on_progress: Callable[[int, int], None],
) -> Evaluation:
    """One pass over a split, in this process or on several ranks of this machine.

    Args:
        job, checkpoint: the model.
        dataset: whose split.
        device: where each rank computes.
        own: the model's tokenizer, and its end of a document.
        options: which split, how many samples, how many ranks.
        on_progress: called with (samples done, samples in all).
    """
    from trainkit.train.inference import ranks
    from trainkit.train.inference.evaluate import Evaluation, EvaluationFeed, evaluate as measure
    from trainkit.train.inference.load import PRECISIONS, load_model, vocabulary

    # before ranks are started: it may refuse the data
    windows = EvaluationFeed(job, dataset, options.split, vocabulary(checkpoint), device)
    if options.tensor_parallel == 1:
        model = load_model(job, checkpoint, device, PRECISIONS[job.training.precision])
        return measure(model, windows, *own, samples=options.samples, progress=on_progress)
    request = ranks.EvaluateRequest(dataset, options.split, options.samples)
    spec = ranks.WorkerSpec(job, checkpoint.folder, device.type, options.weights, evaluate=request)
    found = run_local_ranks(
        ranks.WORKER_ARGV, spec.to_json(), options.tensor_parallel, device.type, on_progress
    )
    return Evaluation(**found)


def _print_evaluation(task: TaskContext, header: EvaluationHeader, found: Evaluation) -> None:
    perplexity = "beyond floating point"
    if found.perplexity is not None:
        perplexity = f"{found.perplexity:,.4f}"
    bits = "n/a" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
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
