"""The units of curation that take a shard through steps: `python -m
trainkit.data.curate.filter_worker SPEC.json ...`; and the one that adds up what they report.

Documents that are left out are listed with step, reason and value; their text stays where it was
read, but for the first of each reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import zstandard
from pydantic import TypeAdapter

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import atomic_open
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.curate.contract import CrawledDocument, CurationStep, Dropped
from trainkit.data.curate.funnel import summarize
from trainkit.data.curate.key_files import KeyNumbers, duplicates_of, open_keys
from trainkit.data.curate.read_back import ID, ORIGIN, as_crawled, read_shard
from trainkit.data.curate.signatures import pieces_of, text_key
from trainkit.data.curate.specs import FilterResult, FilterSpec, StepCounts, SummarySpec
from trainkit.data.curate.step_files import step_files, words_identity
from trainkit.data.curate.steps import STEPS
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.text.corpus import CountedStream, file_size, open_shard
from trainkit.data.text.documents import BadLine, SkippedMember
from trainkit.data.text.filters import DocumentFilter
from trainkit.data.text.formats import open_documents
from trainkit.data.text.rejects import CHECK_EVERY, Rejects
from trainkit.data.text.write_shards import DocumentWriter
from trainkit.data.unit_specs import FileRead
from trainkit.jobs.curation import Step

SAMPLES = 3  # documents of each reason whose text is kept, of each shard
SHOWN = 4000  # characters of those


class DroppedList:
    """What is left out of a shard, and why. A context manager.

    Args:
        path: .jsonl.zst, an object a document.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._samples: dict[tuple[int, str], int] = {}

    def __enter__(self) -> DroppedList:
        raw = self._stack.enter_context(atomic_open(self._path))
        self._file: IO[bytes] = self._stack.enter_context(
            zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False)
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, document: CrawledDocument, number: int, step: str, dropped: Dropped) -> None:
        """List one document."""
        entry: dict[str, object] = {
            "id": document.fields[ID],
            "origin": document.fields[ORIGIN],
            "number": number,
            "step": step,
            "reason": dropped.reason,
            "value": dropped.value,
            "limit": dropped.limit,
            "detail": dropped.detail,
        }
        if isinstance(name := document.fields.get("id"), str):
            entry["name"] = name
        seen = self._samples[number, dropped.reason] = (
            self._samples.get((number, dropped.reason), 0) + 1
        )
        if seen <= SAMPLES:
            entry["text"] = document.text[:SHOWN]
        self._file.write(json.dumps(entry).encode() + b"\n")  # an id may be half a character


class FirstReading:
    """A shard's documents as they were published.

    Args:
        spec: of the unit, which has no key file.
        rejects: takes bad lines.

    Attributes:
        lines, passed: as in `FilterResult`. read: the file, where it lies here.
        position: bytes so far.
    """

    def __init__(self, spec: FilterSpec, rejects: Rejects) -> None:
        self._spec = spec
        self._rejects = rejects
        self.filter = DocumentFilter(spec.reading.filters)
        self.lines = self.position = 0
        self.passed: dict[str, int] = {}
        self.read: list[FileRead] = []

    def documents(self) -> Iterator[CrawledDocument]:
        """All of them. Raises ConfigError (exit 6) as `open_documents` and `Rejects` do."""
        spec = self._spec
        identity = None if spec.recipe else identity_of(spec.shard)
        options = replace(spec.reading.options, fields=None)
        with open_shard(spec.shard, spec.recipe) as raw:
            stream = CountedStream(raw)
            items = open_documents(spec.shard.name, stream, options, str(spec.shard))
            for item in items:
                self.position = stream.position
                if isinstance(item, SkippedMember):
                    self.passed[item.reason] = self.passed.get(item.reason, 0) + 1
                    continue
                self.lines += 1
                if isinstance(item, BadLine):
                    self._rejects.add(item, items)
                elif (parts := self.filter(item)) is not None:
                    yield as_crawled(item, b"\n".join(parts).decode(), spec.reading.text_key)
                if self.lines % CHECK_EVERY == 0:
                    self._rejects.check(self.lines, items)
            self._rejects.check(self.lines)
            if identity:
                whole = stream.position == identity[1] and stream.in_order
                digest = stream.digest.hexdigest() if whole else file_sum(spec.shard)
                self.read.append((*identity[:3], digest))


@lru_cache(maxsize=1)
def _numbers_of(path: Path, changed: int) -> KeyNumbers:
    """The same for all shards of a pass."""
    return KeyNumbers.from_file(path)


class DuplicateFilter:
    """Leaves out what an earlier search found in the documents of one shard, all of which it sees
    in their order.

    Args:
        spec: with its key file.

    Raises ConfigError (exit 6): the shard has other documents than were compared.
    """

    def __init__(self, spec: FilterSpec) -> None:
        assert spec.keys and spec.numbers_file and spec.duplicates_step
        self._facts = open_keys(spec.keys).documents
        self._unit = str(spec.duplicates_step.get("unit", "document"))
        self._least = int(str(spec.duplicates_step.get("min_characters", 1)))
        self._numbers = _numbers_of(spec.numbers_file, spec.numbers_file.stat().st_mtime_ns)
        first = self._numbers.first_of(spec.keys)
        rows = duplicates_of(spec.duplicates, first, first + len(self._facts))
        self._rows: dict[int, dict[int, tuple[int, int]]] = {}
        for number, key, kept, size in rows.tolist():
            self._rows.setdefault(number - first, {})[key] = (kept, size)
        self._seen = 0

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        number = self._seen
        self._seen += 1
        if number >= len(self._facts) or int(self._facts[number, 0]) != document.key:
            raise ConfigError(
                f"document {number + 1} ({document.fields[ID]}) is not the one that was compared",
                exit=Exit.STAGE_FAILED,
                hint="prep-data --force makes all of it again",
            )
        rows = self._rows.get(number, {})
        if self._unit == "document":
            for kept, size in rows.values():
                return Dropped("duplicate", size, 1, f"of {self._numbers.id_of(kept)}")
            return None
        pieces = pieces_of(document.text, self._unit)
        seen: set[int] = set()
        left: list[str] = []
        for at in range(0, len(pieces), 2):
            stripped = pieces[at].strip()
            key = text_key(stripped)
            counted = len(stripped) >= self._least and bool(stripped)
            if counted and (key in rows or key in seen):
                continue
            seen.add(key)
            left += pieces[at : at + 2]
        if len(left) == len(pieces):
            return None
        text = "".join(left).strip("\n")
        if not text.strip():  # the first of each line stays, so others hold the rest
            kept, size = next(iter(rows.values()))
            return Dropped(
                "duplicate", size, 1, f"all of it in others, first {self._numbers.id_of(kept)}"
            )
        document.text = text
        return None


def _step(table: Mapping[str, object]) -> Step:
    adapter: TypeAdapter[Step] = TypeAdapter(Step)
    return adapter.validate_python(dict(table))


class FilterWorker:
    """Takes one shard after another through its steps; what steps load is loaded once."""

    def __init__(self) -> None:
        self._steps: dict[str, CurationStep] = {}
        self._sums: dict[Path, FileRead] = {}

    def __call__(self, value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
        if value["do"] == "summary":
            return summarize(SummarySpec.from_json(value))
        spec = FilterSpec.from_json(value)
        reading = spec.reading
        with (
            Rejects(
                spec.rejects if spec.keys is None else None,  # a later pass meets none
                skip=reading.on_error == "skip",
                max_fraction=reading.max_reject_fraction,
            ) as rejects,
            DroppedList(spec.dropped) as dropped,
            DocumentWriter(spec.output, reading.text_key) as writer,
        ):
            return self._run(spec, rejects, dropped, writer, progress).to_json()

    def _step(self, table: Mapping[str, object], language: str) -> CurationStep:
        key = json.dumps([dict(table), language], sort_keys=True)
        if key not in self._steps:
            self._steps[key] = STEPS[str(table["step"])](_step(table), language)
        return self._steps[key]

    def _files(self, spec: FilterSpec) -> list[FileRead]:
        """What the steps have read beside the documents."""
        paths = [Path(path) for table in spec.steps for path in step_files(_step(table))]
        for path in paths:
            if path not in self._sums:
                self._sums[path] = (*identity_of(path)[:3], file_sum(path))
        return [self._sums[path] for path in paths]

    def _run(
        self,
        spec: FilterSpec,
        rejects: Rejects,
        dropped: DroppedList,
        writer: DocumentWriter,
        progress: ProgressCallback,
    ) -> FilterResult:
        counts = [
            StepCounts(number, str(table["step"]))
            for number, table in zip(spec.numbers, spec.steps, strict=True)
        ]
        steps = [self._step(table, spec.language) for table in spec.steps]
        reading = FirstReading(spec, rejects)
        documents = reading.documents()
        if spec.keys is not None and spec.duplicates_step is not None:
            steps.insert(0, DuplicateFilter(spec))
            documents = read_shard(spec.shard, spec.reading.text_key)
            name = str(spec.duplicates_step["step"])
            counts.insert(0, StepCounts(spec.duplicates_number, name))
        total = max(1, file_size(spec.shard) or spec.size)
        for number, document in enumerate(documents):
            if number % 64 == 0:
                progress(min(reading.position, total - 1), total)
            if take_through(document, steps, counts, dropped):
                _write(document, writer)
        progress(total, total)
        if spec.keys is not None:
            reading.read.append((*identity_of(spec.shard)[:3], file_sum(spec.shard)))
        reading.read += self._files(spec)
        return FilterResult(
            writer.documents,
            writer.text_bytes,
            reading.lines,
            tuple(counts),
            reading.filter.dropped,
            rejects.total,
            rejects.counts,
            reading.passed,
            words_identity(),
            tuple(reading.read),
        )


def _write(document: CrawledDocument, writer: DocumentWriter) -> None:
    """All its copies. Raises ConfigError (exit 6): its fields are nothing that JSON has, as a
    function of the user's may leave them."""
    try:
        for _ in range(document.copies):
            writer.add(document.text, document.fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the fields of {document.fields[ORIGIN]} cannot be written: {error}",
            exit=Exit.STAGE_FAILED,
            hint="a step of yours (function) must leave values that JSON has",
        ) from None


def take_through(
    document: CrawledDocument,
    steps: Sequence[CurationStep],
    counts: Sequence[StepCounts],
    dropped: DroppedList,
) -> bool:
    """Whether a document comes through all steps; each counts it."""
    for step, count in zip(steps, counts, strict=True):
        copies = document.copies
        count.documents_in += copies
        count.bytes_in += copies * len(document.text.encode())
        found = step(document)
        if found is not None:
            count.reasons[found.reason] = count.reasons.get(found.reason, 0) + copies
            dropped.add(document, count.number, count.step, found)
            return False
        count.documents_out += document.copies
        count.bytes_out += document.copies * len(document.text.encode())
    return True


if __name__ == "__main__":
    run_unit(FilterWorker())
