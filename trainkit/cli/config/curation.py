"""The tasks about curated text: data-stats --curation, data-why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.dataset_folders import dataset_folders
from trainkit.cli.config.funnel import funnel_page
from trainkit.cli.options import StatsOptions
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.curate.funnel import draw_funnel, read_curation
from trainkit.data.curate.look_up import CuratedFolder, DocumentFate, published_text, similarity
from trainkit.data.indexed.paths import DataFolder
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
