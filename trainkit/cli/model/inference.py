"""The tasks after training: generate, evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.stages import bring_up_to_date
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Dataset, Job
from trainkit.launch.local_ranks import run_together
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import find_run
from trainkit.stages.build import Build
from trainkit.stages.execute import stamps_folder
from trainkit.stages.prep_data import PrepData, needs_of_dataset
from trainkit.stages.stamps import file_identity
from trainkit.train.inference import ranks as sharded


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a line is a JSON string, or a JSON object whose key "prompt" holds one;
    empty lines are passed over.

    Raises ConfigError for the first line that is neither, and for a file without prompts.
    OSError as reading does.
    """
    prompts = []
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            prompt = value.get("prompt")
        else:
            prompt = value
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{path}:{number}: neither a JSON string nor {{"prompt": "..."}}: {line[:60]}',
                hint="plain text to JSON lines: jq -R .",
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def generate(
    task: TaskContext,
    words: str,
    prompts: Sequence[str],
    prompts_file: str,
    sampling: Mapping[str, Any],
    *,
    max_new_tokens: int,
    step: int | None,
    device: str,
    tensor_parallel: int,
) -> TaskResult:
    """The task `generate`. `sampling`: the fields of train.sampling.Sampling."""
    from trainkit.train.inference.generate import generate as write
    from trainkit.train.inference.sampling import Sampling

    how = Sampling(**sampling)
    asked = [*prompts, *(read_prompts(Path(prompts_file)) if prompts_file else [])] or [""]
    run = find_run(load_jobs(task).roots(), words)
    warn_of_another_tokenizer(run)
    choice: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "step": step,
        "device": device,
        "ranks": tensor_parallel,
    }
    found, generations = write(run, asked, how, **choice, together=run_together)
    if not task.json:
        for number, generation in enumerate(generations, start=1):
            if len(generations) > 1:
                task.say(f"--- {number} of {len(generations)}")
            task.say(generation.text)
    first = generations[0]
    return TaskResult(
        document(
            "generate/1",
            run=run.id,
            step=found,
            prompt=first.prompt,
            text=first.text,
            generations=[dataclasses.asdict(g) for g in generations],
        )
    )


def evaluate(
    task: TaskContext,
    words: str,
    dataset: str,
    split: str,
    samples: int,
    step: int | None,
    device: str,
    tensor_parallel: int,
) -> TaskResult:
    """The task `evaluate`."""
    from trainkit.train.inference.evaluate import Evaluation, Windows, refuse_unreadable
    from trainkit.train.inference.evaluate import evaluate as measure
    from trainkit.train.inference.load import (
        PRECISIONS,
        choose_checkpoint,
        choose_device,
        load_model,
        load_own_tokenizer,
        refuse_unsplittable,
        vocabulary,
    )

    jobs = load_jobs(task)
    run = find_run(jobs.roots(), words)
    job = read_job(run.job)
    if dataset:
        wanted = jobs.dataset(dataset)
    else:
        wanted = job.dataset
    refuse_unreadable(wanted, split)
    tokenizer, end = load_own_tokenizer(job)
    on = choose_device(job, device)
    refuse_unsplittable(job, tensor_parallel, on)
    saved = choose_checkpoint(run, step)
    warn_of_another_tokenizer(run)
    _prepare(task, job, wanted, tokenizer)
    facts = {
        "run": run.id,
        "step": saved.manifest.step,
        "dataset": wanted.name,
        "split": split,
        "device": on.type,
        "precision": job.training.precision,
    }
    if task.dry_run:
        task.say(
            f"would evaluate step {saved.manifest.step} of run {run.id} on the {split} split of"
            f" {wanted.name} on {on.type}"
        )
        return TaskResult(document("evaluate/1", dry_run=True, **facts))
    # before ranks are started: it may refuse
    windows = Windows(job, wanted, split, vocabulary(saved), on)
    with _bar(task) as progress:
        if tensor_parallel > 1:
            spec = sharded.spec_of(
                "evaluate",
                job,
                saved.folder,
                on.type,
                dataset=wanted.model_dump(mode="json"),
                split=split,
                samples=samples,
            )
            found = Evaluation(
                **run_together(sharded.ARGV, spec, tensor_parallel, on.type, progress)
            )
        else:
            model = load_model(job, saved, on, PRECISIONS[job.training.precision])
            found = measure(model, windows, tokenizer, end, samples=samples, progress=progress)
    task.say(
        f"step {facts['step']} of run {run.id} on {wanted.name} ({split}): {found.tokens:,} tokens"
        f" of {found.samples:,} samples in {found.seconds:.1f} s"
    )
    if found.perplexity is None:
        perplexity = "beyond floating point"
    else:
        perplexity = f"{found.perplexity:,.4f}"
    if found.bits_per_byte is None:
        bits = "n/a"
    else:
        bits = f"{found.bits_per_byte:.4f}"
    task.say(
        f"loss {found.loss:.4f} nats/token, perplexity {perplexity}, {bits} bits/byte of"
        f" {found.bytes:,} bytes"
    )
    return TaskResult(document("evaluate/1", dry_run=False, **facts, **dataclasses.asdict(found)))


def _prepare(task: TaskContext, job: Job, wanted: Dataset, tokenizer: Tokenizer) -> None:
    """Have `wanted` prepared with the job's own tokenizer. The run's own data is never made
    anew: its tokenizer would be, too.

    Raises ConfigError for another tokenizer, before a preparation that would only make one.
    """
    from trainkit.train.inference.evaluate import refuse_other_tokenizer

    root = Path(job.cluster.root or ".")
    own = DataFolder(root, job.dataset)
    folder = DataFolder(root, wanted)
    if folder.path == own.path:
        return
    assert wanted.tokenizer is not None, "only mock data has none"
    if wanted.tokenizer.type == "file":
        refuse_other_tokenizer(job, tokenizer, wanted, Path(str(wanted.tokenizer.path)))
    elif folder.tokenizer.is_file():
        refuse_other_tokenizer(job, tokenizer, wanted, folder.tokenizer)
    else:
        raise ConfigError(
            f"dataset {wanted.name!r} is not prepared, and its tokenizer {wanted.tokenizer.name!r}"
            " would be trained on its own text",
            hint=f'give it a tokenizer of type = "file" with path = "{own.tokenizer}"',
        )
    needs = needs_of_dataset(wanted, root, stamps_folder(root, PrepData.name))
    bring_up_to_date(task, [*Build().needs(None, stamps_folder(root, Build.name)), *needs], root)
    if not task.dry_run:
        refuse_other_tokenizer(job, tokenizer, wanted, folder.tokenizer)


def warn_of_another_tokenizer(run: RunFolder) -> None:
    """Say on stderr if the run's tokenizer.json is not the file it began with: its ids may mean
    other text now."""
    inputs = run.path / "launch" / "inputs.json"
    if not inputs.is_file():  # made by hand
        return
    for old in read_document(inputs, "inputs/1")["files"]:
        path = Path(old[0])
        if path.name == "tokenizer.json" and path.is_file() and file_identity(path) != old:
            print(
                f"WARNING: {path} has changed since run {run.id} began; if its ids mean other text"
                " now, what follows is nonsense",
                file=sys.stderr,
            )


@contextlib.contextmanager
def _bar(task: TaskContext) -> Iterator[Callable[[int, int], None]]:
    """A bar over samples where there is a terminal; nothing elsewhere."""
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
