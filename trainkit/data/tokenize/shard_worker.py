"""The units of prep-data that work on one shard: `python -m trainkit.data.tokenize.shard_worker
SPEC.json` writes its text or its tokens.

Tokens are made as a stream: one thread reads, decompresses, parses and filters, this one
encodes, a third writes. Specs and results: trainkit/data/unit_specs.py.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import locked
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import IndexedWriter, best_dtype
from trainkit.data.indexed.paths import idx_path
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.text.corpus import CountedStream, file_size, open_shard
from trainkit.data.text.documents import BadLine, ParsedItem, SkippedMember
from trainkit.data.text.filters import DocumentFilter
from trainkit.data.text.formats import open_documents
from trainkit.data.text.rejects import CHECK_EVERY, Rejects
from trainkit.data.tokenize.encoders import (
    CheckedEncoder,
    Encoder,
    EncoderCache,
    EncoderChoice,
    EncoderMismatch,
    HybridEncoder,
    Ids,
    Lengths,
    with_eod,
)
from trainkit.data.tokenizer import end_of_document
from trainkit.data.unit_specs import FileRead, TextResult, TextSpec, TokensResult, TokensSpec

T = TypeVar("T")
POLL_SECONDS = 0.2  # how soon a thread that waits sees that nobody wants its work any more


class _End:
    """The last thing in a queue: `error` if the work did not end well."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Channel(Generic[T]):
    """A queue of one item that either side can leave."""

    def __init__(self) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(1)
        self.get = self._queue.get
        self.left = threading.Event()

    def put(self, item: T | _End) -> bool:
        """Whether it was taken: False once the reader has left."""
        while not self.left.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False


@contextmanager
def read_ahead(source: Iterator[T]) -> Iterator[Iterator[T]]:
    """Run `source` in a thread, one item ahead of who iterates over what is given. Its exceptions
    are raised there.

    When the block ends the source has been closed, in its thread.
    """
    channel: _Channel[T] = _Channel()

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not channel.put(item):
                    break
        except BaseException as caught:
            error = caught
        finally:
            if hasattr(source, "close"):
                source.close()
        channel.put(_End(error))

    def items() -> Iterator[T]:
        while not isinstance(item := channel.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = threading.Thread(target=produce, name="ahead", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        channel.left.set()
        thread.join()


@contextmanager
def write_behind(sink: Callable[[T], None]) -> Iterator[Callable[[T], None]]:
    """Run `sink` in a thread, one item behind who calls what is given. Its exception is raised by a
    later call or at the block's end.

    Without an exception, all items have been taken when the block ends; with one in the block,
    the waiting ones are not.
    """
    channel: _Channel[T] = _Channel()
    failed: list[BaseException] = []

    def consume() -> None:
        try:
            while not isinstance(item := channel.get(), _End):
                sink(item)
        except BaseException as caught:
            failed.append(caught)
            channel.left.set()

    def give(item: T) -> None:
        if not channel.put(item):
            raise failed[0]

    thread = threading.Thread(target=consume, name="behind", daemon=True)
    thread.start()
    try:
        yield give
    finally:
        channel.put(_End())
        thread.join()
    if failed:
        raise failed[0]


BATCH_BYTES = 2**20  # of text encoded at once: bounds memory whatever the corpus's size
BATCH_DOCUMENTS = 2**13
CHECK_DOCUMENTS = 200
M_ARENA_MAX = -8  # of mallopt(3)


@dataclass
class TextBatch:
    """Documents to be encoded at once.

    Attributes:
        texts: their sequences in UTF-8.
        sequences: of each document.
        places: file and line of each.
        size: bytes of text.
        position: bytes of the shard that were read up to its end.
    """

    texts: list[bytes] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    size: int = 0
    position: int = 0

    def place(self, sequence: int) -> SourceLocation:
        """Of the document that the text number `sequence` belongs to."""
        document = int(np.searchsorted(np.cumsum(self.sequences), sequence, side="right"))
        return SourceLocation(*self.places[document])


class ShardReader:
    """Batches of a shard's documents, and what was counted on the way.

    Args:
        spec: of the unit.
        rejects: takes the bad lines.
    """

    def __init__(self, spec: TokensSpec, rejects: Rejects) -> None:
        self.path = spec.shard
        self.recipe = spec.recipe
        self.options = spec.reading.options
        self.filter = DocumentFilter(spec.reading.filters)
        self.rejects = rejects
        self.lines = 0
        self.passed: dict[str, int] = {}
        self.read: list[FileRead] = []  # of a file that is here: what was read of it

    def batches(self) -> Iterator[TextBatch]:
        """All of them. Raises ConfigError (exit 6) as `open_documents` and `Rejects` do."""
        identity = None if self.recipe else identity_of(self.path)
        with open_shard(self.path, self.recipe) as raw:
            stream = CountedStream(raw)
            documents = open_documents(self.path.name, stream, self.options, str(self.path))
            batch = TextBatch()
            with closing(documents):  # type: ignore[type-var]
                for item in documents:
                    self._take(item, batch, documents)
                    if batch.size >= BATCH_BYTES or len(batch.places) >= BATCH_DOCUMENTS:
                        batch.position = stream.position
                        yield batch
                        batch = TextBatch()
            self.rejects.check(self.lines)
            if identity:
                whole = stream.position == identity[1] and stream.in_order
                digest = stream.digest.hexdigest() if whole else file_sum(self.path)
                self.read.append((identity[0], identity[1], identity[2], digest))
            batch.position = stream.position
            if batch.places:
                yield batch

    def _take(self, item: ParsedItem, batch: TextBatch, rest: Iterator[ParsedItem]) -> None:
        """Count one item of the file; a document that is not left out goes into the batch."""
        if isinstance(item, SkippedMember):
            self.passed[item.reason] = self.passed.get(item.reason, 0) + 1
            return
        self.lines += 1
        if isinstance(item, BadLine):
            self.rejects.add(item, rest)
        elif (parts := self.filter(item)) is not None:
            batch.texts += parts
            batch.sequences.append(len(parts))
            batch.places.append((item.where, item.line))
            batch.size += sum(map(len, parts))
        if self.lines % CHECK_EVERY == 0:
            self.rejects.check(self.lines, rest)


class ShardWriter:
    """Ids of batches to .bin/.idx, counted and hashed on the way.

    Args:
        writer: the open pair.
        eod: id behind every document with tokens, or None.
    """

    def __init__(self, writer: IndexedWriter, eod: int | None) -> None:
        self.writer = writer
        self.eod = eod
        self.documents = self.empty = self.sequences = self.tokens = self.text_bytes = 0
        self.hash = xxhash.xxh3_128()

    def __call__(self, item: tuple[TextBatch, Ids, Lengths]) -> None:
        """Write one batch."""
        batch, ids, lengths = item
        several = len(batch.sequences) != len(batch.texts) or any(
            count != 1 for count in batch.sequences
        )
        sequences: NDArray[np.int64] | None
        sequences = np.array(batch.sequences, np.int64) if several else None
        tokens, lengths = with_eod(ids, lengths, sequences, self.eod, self.writer.dtype)
        self.writer.add_documents(tokens, lengths, sequences)
        self.hash.update(tokens.data)
        there = lengths > 0
        written = int(there.sum())
        if sequences is None:
            full = written
        else:
            full = len(np.unique(np.repeat(np.arange(len(sequences)), sequences)[there]))
        self.documents += len(batch.sequences)
        self.empty += len(batch.sequences) - full
        self.sequences += written
        self.tokens += len(tokens)
        self.text_bytes += batch.size


def write_text(spec: TextSpec) -> TextResult:
    """Write one shard of text from its source's recipe."""
    from trainkit.data.sources import SOURCES

    return SOURCES[spec.source].write(spec.recipe, spec.path, spec.text_key)


def write_tokens(
    spec: TokensSpec, progress: ProgressCallback, encoders: EncoderCache
) -> TokensResult:
    """Encode one shard of text to .bin/.idx: the end-of-document id after every document that
    has a token.

    An empty document becomes an entry of the document index without a sequence, as in Megatron's
    preprocess_data.py.

    Args:
        spec: the shard, and how it becomes tokens.
        progress: called with bytes done and to do, and with what was written so far.
        encoders: loaded before, for other shards.

    Raises ConfigError (exit 6): see `open_documents`, `Rejects` and `EncoderCache`; gigatoken's
    ids are not those of tokenizers.
    """
    prefix = spec.prefix
    tokenizer, encoder, choice = encoders.get(
        spec.tokenizer,
        spec.encoding.encoder,
        spec.encoding.special_tokens,
        first=CHECK_DOCUMENTS if spec.first else 0,
        offset=zlib.crc32(prefix.name.encode()),
    )
    eod = None
    if spec.encoding.append_eod:
        eod = end_of_document(tokenizer, spec.encoding.eod_token, spec.tokenizer)
    dtype = _dtype_for(tokenizer, encoder, spec.tokenizer)
    reading = spec.reading
    with (
        locked(prefix.with_name(prefix.name + ".lock"), {"shard": str(spec.shard)}),
        Rejects(
            spec.rejects,
            skip=reading.on_error == "skip",
            max_fraction=reading.max_reject_fraction,
        ) as rejects,
    ):
        reader = ShardReader(spec, rejects)
        with IndexedWriter(prefix, dtype) as pair:
            writer = ShardWriter(pair, eod)
            _run(reader, encoder, writer, spec.size, progress)
    return _result(reader, writer, encoder, choice)


def _dtype_for(tokenizer: Tokenizer, encoder: Encoder, path: Path) -> np.dtype[Any]:
    """The dtype that Megatron chooses. Raises ConfigError (exit 6) where an id does not fit it."""
    dtype = best_dtype(tokenizer.get_vocab_size())
    if encoder.highest > np.iinfo(dtype).max:
        raise ConfigError(
            f"{path} has {tokenizer.get_vocab_size():,} ids, which is why they are written as"
            f" {dtype.name}, but its highest is {encoder.highest:,}",
            exit=Exit.STAGE_FAILED,
            hint="use a tokenizer without such gaps",
        )
    return dtype


def _result(
    reader: ShardReader, writer: ShardWriter, encoder: Encoder, choice: EncoderChoice
) -> TokensResult:
    """What became of a shard, once all of it is written."""
    compared = 0
    passed_on = 0
    if isinstance(encoder, CheckedEncoder):
        compared = encoder.compared
        if isinstance(encoder.fast, HybridEncoder):
            passed_on = encoder.fast.passed_on
    return TokensResult(
        documents=writer.documents,
        empty_documents=writer.empty,
        sequences=writer.sequences,
        tokens=writer.tokens,
        text_bytes=writer.text_bytes,
        lines=reader.lines,
        left_out=reader.filter.dropped,
        drop_present=reader.filter.present,
        passed_over=reader.passed,
        rejects=reader.rejects.total,
        rejected=reader.rejects.counts,
        encoder=choice.name,
        encoder_because=choice.because,
        compared=compared,
        passed_on=passed_on,
        bin_xxh128=writer.hash.hexdigest(),
        idx_xxh128=file_sum(idx_path(writer.writer.prefix)),
        read=tuple(reader.read),
    )


def _run(
    reader: ShardReader,
    encoder: Encoder,
    writer: ShardWriter,
    size: int,
    progress: ProgressCallback,
) -> None:
    """Batch after batch through the three threads."""
    total = file_size(reader.path) or size
    with read_ahead(reader.batches()) as batches, write_behind(writer) as write:
        for batch in batches:
            try:
                ids, lengths = encoder.encode(batch.texts)
            except EncoderMismatch as found:
                place = batch.place(found.index)
                message = f"gigatoken does not give the ids of tokenizers: {found.words}"
                raise ConfigError(
                    [Problem(message, place, 'set tokenizers.X.encoder = "tokenizers"')],
                    exit=Exit.STAGE_FAILED,
                ) from None
            write((batch, ids, lengths))
            progress(
                min(batch.position, total),
                max(1, total),
                tokens=writer.tokens,
                text_bytes=writer.text_bytes,
            )


def _one_arena() -> None:
    """Have glibc's malloc serve all threads from one heap: texts are made in one thread and
    freed in another, and a heap for each costs 70 MB more.

    Other C libraries know no mallopt, and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


class ShardWorker:
    """Does what `spec["do"]` names, "text" or "tokens", for one spec after another."""

    def __init__(self) -> None:
        self._encoders = EncoderCache()

    def __call__(self, value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
        if value["do"] == "text":
            return write_text(TextSpec.from_json(value)).to_json()
        return write_tokens(TokensSpec.from_json(value), progress, self._encoders).to_json()


if __name__ == "__main__":
    _one_arena()
    # one process a shard: the processes are the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run_unit(ShardWorker())
