"""The tasks about prepared data: data-stats, data-verify."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit, Problem, raise_problems
from trainkit.cli.config.dataset_folders import dataset_folders
from trainkit.cli.options import StatsOptions
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.indexed.paths import DataFolder, read_manifest
from trainkit.data.indexed.statistics import (
    DatasetCounts,
    Statistics,
    count,
    draw_statistics,
    statistics,
)
from trainkit.data.indexed.verify import verify_dataset
from trainkit.data.order.resolve_pairs import prefixes_of
from trainkit.data.tokenizer import load_tokenizer
from trainkit.jobs.schema import Dataset

BAR = 40  # columns of the longest bar


def _prefixes(dataset: Dataset, folder: DataFolder) -> list[Path]:
    read_manifest(folder.manifest)  # raises ConfigError if it is not prepared
    if dataset.source == "indexed":
        return prefixes_of(dataset, folder.root)
    return folder.prefixes()


def stats(task: TaskContext, name: str, options: StatsOptions) -> TaskResult:
    """The task `data-stats`."""
    folders = dataset_folders(task, name, options.job)
    if options.curation:
        from trainkit.cli.config.curation import curation_stats

        return curation_stats(task, name, folders, options)
    prefixes = [prefix for dataset, folder in folders for prefix in _prefixes(dataset, folder)]
    if options.count_only:
        counts = count(prefixes)
        values = document("data-stats/1", dataset=name, **vars(counts))
        return TaskResult(values, page=[_counts(counts)])
    tokenizer = load_tokenizer(folders[0][1].tokenizer)  # a blend's parts have the same
    found = statistics(prefixes, tokenizer, samples=options.samples, seed=options.seed)
    if options.picture:
        draw_statistics(name, found, Path(options.picture))
        task.say(f"wrote {options.picture}")
    return TaskResult(
        document("data-stats/1", dataset=name, **found.to_json()), page=_statistics_page(found)
    )


def _counts(counts: DatasetCounts) -> str:
    return (
        f"{counts.documents:,} documents, {counts.sequences:,} sequences, {counts.tokens:,} tokens"
    )


def _statistics_page(found: Statistics) -> Page:
    """Counts, lengths as bars, the most frequent tokens, the samples."""
    yield _counts(found.counts)
    percentiles = ", ".join(
        f"{percent} % have at most {tokens:,}" for percent, tokens in found.percentiles.items()
    )
    yield (
        f"of the documents, {percentiles or 'none has a length'} tokens; the longest has"
        f" {found.longest:,}, {found.empty_documents:,} are empty"
    )
    yield _lengths_table(found)
    yield f"{found.ids_used:,} of {found.vocab_size:,} ids occur; the most frequent:"
    yield _tokens_table(found)
    for sample in found.samples:
        yield f"--- document {sample.document:,} of {sample.pair}, {sample.tokens:,} tokens:"
        yield f"{sample.text} ..." if sample.tokens > len(sample.text) else sample.text


def _table(*headings: str) -> Listing:
    """All columns but the last are numbers."""
    return Listing(*headings, right=headings[:-1])


def _lengths_table(found: Statistics) -> Listing:
    table = _table("tokens", "documents", "of all tokens", "")
    largest = max((bin.documents for bin in found.lengths), default=1)
    for bin in found.lengths:
        lengths = f"{bin.low:,}"
        if bin.high > bin.low:
            lengths = f"{bin.low:,} to {bin.high:,}"
        share = bin.tokens / max(1, found.counts.tokens)
        bar = "#" * round(BAR * bin.documents / largest)
        table.add_row(lengths, f"{bin.documents:,}", f"{share:.1%}", bar)
    return table


def _tokens_table(found: Statistics) -> Listing:
    table = _table("id", "times", "share", "token")
    for entry in found.frequent:
        share = entry.count / found.counts.tokens
        table.add_row(str(entry.id), f"{entry.count:,}", f"{share:.2%}", escape(repr(entry.text)))
    return table


@dataclass(frozen=True)
class VerifiedDataset:
    """An entry of the document data-verify/1: what was checked, in a dataset without problems."""

    name: str
    documents: int
    sequences: int
    tokens: int
    checked_bytes: int


def verify(task: TaskContext, name: str, job: str) -> TaskResult:
    """The task `data-verify`. Raises ConfigError (exit 6) with everything that is wrong."""
    problems: list[Problem] = []
    verified = []
    for dataset, folder in dataset_folders(task, name, job):
        manifest = read_manifest(folder.manifest)
        assert dataset.tokenizer is not None
        found = verify_dataset(
            folder.path, manifest, _prefixes(dataset, folder), eod=dataset.tokenizer.append_eod
        )
        problems += found.problems
        verified.append(
            VerifiedDataset(
                dataset.name, found.documents, found.sequences, found.tokens, found.checked_bytes
            )
        )
    raise_problems(problems, Exit.STAGE_FAILED)
    rows = [asdict(each) for each in verified]
    return TaskResult(
        document("data-verify/1", dataset=name, datasets=rows), page=map(_sound_line, verified)
    )


def _sound_line(found: VerifiedDataset) -> str:
    checksums = "; ready-made pairs have no checksums"
    if found.checked_bytes:
        checksums = f", checksums of {found.checked_bytes / 1e6:,.1f} MB"
    return (
        f"{found.name} is sound: {found.documents:,} documents, {found.sequences:,} sequences,"
        f" {found.tokens:,} tokens{checksums}"
    )
