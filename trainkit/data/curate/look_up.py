"""What became of one document, and examples of what is left out for each reason."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zstandard

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.base.records import Record
from trainkit.data.curate.read_back import ID, ORIGIN, as_crawled, read_shard
from trainkit.data.curate.signatures import MinHashKeys
from trainkit.data.text.corpus import open_shard
from trainkit.data.text.documents import TextDocument
from trainkit.data.text.filters import DocumentFilter
from trainkit.data.text.formats import open_documents
from trainkit.data.unit_specs import ReadingSettings
from trainkit.jobs.curation import MinHashStep


@dataclass(frozen=True)
class DocumentFate(Record):
    """What became of a document; the entry of a list of dropped ones, or one that was kept.

    Args:
        id: what `trainkit_id` says; name: the published id, if it has one.
        origin: FILE:LINE where it was read.
        step, number: which step left it out; "": none did.
        reason, value, limit, detail: as in `Dropped`.
        text: what was left of it then, if it is there to be read.
        written: the file it is in, of one that was kept.
    """

    id: str
    origin: str
    step: str = ""
    number: int = -1
    reason: str = ""
    value: float = 0.0
    limit: float = 0.0
    detail: str = ""
    name: str = ""
    text: str | None = None
    written: str = ""


@dataclass
class CuratedFolder:
    """The files of a dataset that was curated.

    Args:
        path: <root>/data/NAME/curated.
        curation: its curation.json.
        text_key: of the dataset.
    """

    path: Path
    curation: Mapping[str, Any]
    text_key: str
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = [str(shard["name"]) for shard in self.curation["shards"]]

    def dropped(self) -> Iterator[DocumentFate]:
        """All documents that were left out, in the order of passes and shards."""
        for number in range(self.curation["passes"]):
            for name in self._names:
                path = self.path / "dropped" / f"pass-{number}" / f"{name}.jsonl.zst"
                with (
                    open(path, "rb") as raw,
                    zstandard.ZstdDecompressor().stream_reader(raw) as data,
                ):
                    for line in io.BufferedReader(data):
                        yield DocumentFate.from_json(json.loads(line))

    def samples(self, of_each: int) -> list[DocumentFate]:
        """The first documents of each reason whose text was kept, so many of each, by step."""
        found: dict[tuple[int, str], list[DocumentFate]] = {}
        for fate in self.dropped():
            of_reason = found.setdefault((fate.number, fate.reason), [])
            if fate.text is not None and len(of_reason) < of_each:
                of_reason.append(fate)
        return [fate for key in sorted(found) for fate in found[key]]

    def find(self, identity: str) -> DocumentFate:
        """A document by `trainkit_id` or by its published id, with the text that it was read with
        where its file is still there. Raises ConfigError (exit 3): there is none."""
        for fate in self.dropped():
            if identity in (fate.id, fate.name):
                return fate
        for path, document in self._kept():
            if identity in (document.fields[ID], document.fields.get("id")):
                return DocumentFate(
                    str(document.fields[ID]),
                    str(document.fields[ORIGIN]),
                    text=document.text,
                    written=str(path),
                )
        raise ConfigError(
            f"no document {identity!r} was read for the dataset {self.curation['name']}",
            hint="ids are what trainkit_id says, 16 hexadecimal digits, or the published `id`",
        )

    def _kept(self) -> Iterator[tuple[Path, Any]]:
        for name in self._names:
            for path in sorted(self.path.glob(f"{name}.*")):
                for document in read_shard(path, self.text_key):
                    yield path, document


def published_text(fate: DocumentFate, reading: ReadingSettings) -> str | None:
    """The text of a document as it was read; None: its file is not here any more, or has another
    document there."""
    where, _, line = fate.origin.rpartition(":")
    path = Path(where.partition("!")[0])
    if not path.is_file():
        return None
    options = replace(reading.options, fields=None)
    with open_shard(path) as stream:
        for item in open_documents(path.name, stream, options, str(path)):
            if isinstance(item, TextDocument) and (item.where, item.line) == (where, int(line)):
                text = b"\n".join(DocumentFilter(reading.filters)(item) or ()).decode()
                same = as_crawled(item, text, reading.text_key).fields[ID] == fate.id
                return text if same else None
    return None


def similarity(a: str, b: str, step: Mapping[str, object], language: str) -> float:
    """The share of MinHash values in which two texts agree: an estimate of the Jaccard index of
    their shingles, with the standard error sqrt(s (1 - s) / bands / rows)."""
    maker = MinHashKeys(MinHashStep.model_validate(step), language)
    first, second = maker.values(a), maker.values(b)
    if not len(first) or not len(second):
        return 0.0
    return float((first == second).mean())
