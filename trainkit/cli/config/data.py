"""The tasks about prepared data and curated text: data-stats, data-verify, data-why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, Problem, raise_problems
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.cli.config.funnel import funnel_page
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import StatsOptions
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.curate.funnel import draw_funnel, read_curation
from trainkit.data.curate.look_up import CuratedFolder, DocumentFate, published_text, similarity
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
from trainkit.data.unit_specs import ReadingSettings
from trainkit.jobs.schema import Dataset

BEGINNING = 70  # characters of an example
SHOWN = 2000  # characters of a text


def _curated(folders: Sequence[tuple[Dataset, DataFolder]]) -> list[CuratedFolder]:
    """Raises ConfigError (exit 3): none of them is curated; (exit 6): one is not prepared."""
    found = [
        CuratedFolder(folder.curated, read_curation(folder.curated), dataset.text_key)
        for dataset, folder in folders
        if dataset.curate is not None
    ]
    if not found:
        names = ", ".join(dataset.name for dataset, _ in folders)
        raise ConfigError(
            f"no text of {names} is curated", hint="give it a table [datasets.X.curate]"
        )
    return found


def curation_stats(
    task: TaskContext,
    name: str,
    folders: Sequence[tuple[Dataset, DataFolder]],
    options: StatsOptions,
) -> TaskResult:
    """The task `data-stats --curation`."""
    found = _curated(folders)
    if options.picture:
        draw_funnel([folder.curation for folder in found], Path(options.picture))
        task.say(f"wrote {options.picture}")
    samples = [fate for folder in found for fate in folder.samples(options.samples)]
    return TaskResult(
        document(
            "data-curation/1",
            dataset=name,
            datasets=[dict(folder.curation) for folder in found],
            samples=[fate.to_json() for fate in samples],
        ),
        page=_curation_page(found, samples),
    )


def _curation_page(found: Sequence[CuratedFolder], samples: Sequence[DocumentFate]) -> Page:
    for folder in found:
        yield from funnel_page(folder.curation)
    if samples:
        yield "examples of what was left out; data-why DATASET ID shows one:"
        table = Listing(
            *("id", "step", "reason", "value", "beginning"),
            right=("value",),
            drop=("step", "value"),
        )
        for fate in samples:
            beginning = " ".join((fate.text or "").split())[:BEGINNING]
            table.add_row(fate.id, fate.step, fate.reason, f"{fate.value:.4g}", escape(beginning))
        yield table


def why(task: TaskContext, name: str, identity: str, job: str) -> TaskResult:
    """The task `data-why`."""
    error: ConfigError | None = None
    for dataset, folder in dataset_folders(task, name, job):
        if dataset.curate is None:
            continue
        curated = CuratedFolder(folder.curated, read_curation(folder.curated), dataset.text_key)
        try:
            fate = curated.find(identity)
        except ConfigError as found:
            error = found
            continue
        original = published_text(fate, _reading(dataset))
        kept = _kept_instead(curated, fate, original, dataset)
        values = document(
            "data-why/1", dataset=dataset.name, **fate.to_json(), original=original, kept=kept
        )
        return TaskResult(values, page=_why_page(fate, original, kept))
    raise error or ConfigError(
        f"no text of {name} is curated", hint="give it a table [datasets.X.curate]"
    )


def _reading(dataset: Dataset) -> ReadingSettings:
    return ReadingSettings.from_json(dataset.model_dump(mode="json"))


def _kept_instead(
    curated: CuratedFolder, fate: DocumentFate, original: str | None, dataset: Dataset
) -> dict[str, object] | None:
    """Of a duplicate: the document that was kept, or came further, and how alike they are."""
    if fate.reason != "duplicate":
        return None
    try:
        other = curated.find(fate.detail.rpartition(" ")[2])
    except ConfigError:  # it is another dataset's
        return None
    text = published_text(other, _reading(dataset))
    table = curated.curation["steps"][fate.number]["table"]
    alike = None
    if original and text and fate.step == "minhash" and dataset.curate is not None:
        alike = similarity(original, text, table, dataset.curate.words)
    return {"id": other.id, "origin": other.origin, "text": text, "similarity": alike}


def _why_page(
    fate: DocumentFate, original: str | None, kept: Mapping[str, object] | None
) -> Iterator[str]:
    yield f"{fate.id}, read at {fate.origin}"
    if fate.step:
        found = f"value {fate.value:.6g}, limit {fate.limit:.6g}"
        if fate.reason == "duplicate":
            found = f"{fate.value:.0f} documents are alike"
        detail = f" ({fate.detail})" if fate.detail else ""
        yield f"left out by step {fate.number + 1}, {fate.step}: {fate.reason}{detail}, {found}"
    else:
        yield f"kept, in {fate.written}"
    if kept:
        alike = kept["similarity"]
        words = f", about {alike:.2f} alike" if isinstance(alike, float) else ""
        yield f"kept instead: {kept['id']}, read at {kept['origin']}{words}"
    if original is None:
        yield "the file it was read from is not here any more, or was changed"
        original = fate.text
    if original is not None:
        yield "---"
        yield original[:SHOWN] + (" ..." if len(original) > SHOWN else "")


def dataset_folders(task: TaskContext, name: str, job: str) -> list[tuple[Dataset, DataFolder]]:
    """The dataset and its folder; for a blend, those of its parts. Raises ConfigError (exit 3)
    for random tokens."""
    jobs = load_jobs(task)
    dataset = jobs.dataset(name)
    if dataset.source == "mock":
        raise ConfigError(f"dataset '{name}' is random tokens: it has no files")
    root = jobs.resolve(job).job.cluster.root_folder if job else jobs.root
    parts = {
        part.dataset.name: part.dataset
        for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend)
        for part in blend.values()
    }
    return [
        (found, DataFolder(root, found))
        for found in (parts.values() if dataset.source == "blend" else [dataset])
    ]


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
        lengths = f"{bin.low:,} to {bin.high:,}" if bin.high > bin.low else f"{bin.low:,}"
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
