"""The tasks that look at prepared data: data-stats, data-verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import StatsOptions
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.manifest import read_manifest
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.indexed.statistics import (
    DatasetCounts,
    Statistics,
    count,
    draw_statistics,
    statistics,
)
from trainkit.data.indexed.verify import VerifyReport, verify_dataset
from trainkit.data.order.resolve_pairs import prefixes_of
from trainkit.data.tokenizer import load_tokenizer
from trainkit.jobs.schema import Dataset

BAR = 40  # columns of the longest bar


def _folders(task: TaskContext, name: str, job: str) -> list[tuple[Dataset, DataFolder]]:
    """The dataset and its folder; of a blend, those of its parts. Raises ConfigError (exit 3)
    for random tokens."""
    jobs = load_jobs(task)
    dataset = jobs.dataset(name)
    if dataset.source == "mock":
        raise ConfigError(f"dataset '{name}' is random tokens: there are no files to look at")
    if job:
        root = Path(jobs.resolve(job).job.cluster.root or ".")
    else:
        root = jobs.root
    parts = {
        part.dataset.name: part.dataset
        for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend)
        for part in blend.values()
    }
    return [
        (found, DataFolder(root, found))
        for found in (parts.values() if dataset.source == "blend" else [dataset])
    ]


def _prefixes(dataset: Dataset, folder: DataFolder) -> list[Path]:
    read_manifest(folder.manifest)  # or it is not prepared
    if dataset.source == "indexed":
        return prefixes_of(dataset, folder.root)
    return folder.prefixes()


def stats(task: TaskContext, name: str, options: StatsOptions) -> TaskResult:
    """The task `data-stats`."""
    folders = _folders(task, name, options.job)
    prefixes = [prefix for dataset, folder in folders for prefix in _prefixes(dataset, folder)]
    if options.count_only:
        counts = count(prefixes)
        if not task.json:
            task.say(_counts(counts))
        return TaskResult(document("data-stats/1", dataset=name, **vars(counts)))
    tokenizer = load_tokenizer(folders[0][1].tokenizer)  # a blend's parts have the same
    found = statistics(prefixes, tokenizer, samples=options.samples, seed=options.seed)
    if options.picture:
        draw_statistics(name, found, Path(options.picture))
        task.say(f"wrote {options.picture}")
    if not task.json:
        _print(task, found)
    return TaskResult(document("data-stats/1", dataset=name, **found.to_json()))


def _counts(counts: DatasetCounts) -> str:
    return (
        f"{counts.documents:,} documents, {counts.sequences:,} sequences, {counts.tokens:,} tokens"
    )


def _table(*headings: str) -> Listing:
    return Listing(*headings, right=headings[:-1])


def _print(task: TaskContext, found: Statistics) -> None:
    """Counts, lengths as bars, the most frequent tokens, the samples."""
    task.say(_counts(found.counts))
    told = ", ".join(
        f"{percent} % have at most {tokens:,}" for percent, tokens in found.percentiles.items()
    )
    task.say(
        f"of the documents, {told or 'none has a length'} tokens; the longest has"
        f" {found.longest:,}, {found.empty_documents:,} are empty"
    )
    lengths, most = (
        _table("tokens", "documents", "of all tokens", ""),
        max((b.documents for b in found.lengths), default=1),
    )
    for b in found.lengths:
        share = b.tokens / max(1, found.counts.tokens)
        lengths.add_row(
            f"{b.low:,} to {b.high:,}" if b.high > b.low else f"{b.low:,}",
            f"{b.documents:,}",
            f"{share:.1%}",
            "#" * round(BAR * b.documents / most),
        )
    task.console.print(lengths)
    task.say(f"{found.ids_used:,} of {found.vocab_size:,} ids occur; the most frequent:")
    tokens = _table("id", "times", "share", "token")
    for entry in found.frequent:
        tokens.add_row(
            str(entry.id),
            f"{entry.count:,}",
            f"{entry.count / found.counts.tokens:.2%}",
            escape(repr(entry.text)),
        )
    task.console.print(tokens)
    for sample in found.samples:
        if sample.tokens > len(sample.text):
            cut = " ..."
        else:
            cut = ""
        task.say(f"--- document {sample.document:,} of {sample.pair}, {sample.tokens:,} tokens:")
        task.say(f"{sample.text}{cut}")


def verify(task: TaskContext, name: str, job: str) -> TaskResult:
    """The task `data-verify`. Raises ConfigError (exit 6) with everything that is wrong."""
    total = VerifyReport()
    rows = []
    for dataset, folder in _folders(task, name, job):
        manifest = read_manifest(folder.manifest)
        assert dataset.tokenizer is not None
        found = verify_dataset(
            folder.path, manifest, _prefixes(dataset, folder), eod=dataset.tokenizer.append_eod
        )
        rows.append(_row(dataset, found))
        total += found
    if total.problems:
        raise ConfigError(total.problems, exit=Exit.STAGE_FAILED)
    for row in rows:
        if row["checked_bytes"]:
            sums = f", checksums of {row['checked_bytes'] / 1e6:,.1f} MB"
        else:
            sums = "; there are no checksums of ready-made pairs"
        task.say(
            f"{row['name']} is sound: {row['documents']:,} documents, {row['sequences']:,}"
            f" sequences, {row['tokens']:,} tokens{sums}"
        )
    return TaskResult(document("data-verify/1", dataset=name, datasets=rows))


def _row(dataset: Dataset, found: VerifyReport) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "documents": found.documents,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "checked_bytes": found.checked_bytes,
    }
