"""The units of prep-data that work on one shard: `python -m trainkit.data.tokenize.shard_worker
SPEC.json` writes its text or its tokens.

Tokens are made as a stream: one thread reads, decompresses, parses and filters, this one
encodes, a third writes. The spec's keys of do = "tokens":

    shard, recipe          the file; or, where it is fetched while it is read, what
    trainkit.data.fetch.worker.open_stream takes (then `shard` only names it) size
    bytes, for progress tokenizer, eod_token   tokenizer.json and the token that ends a document
    prefix, rejects        of the .bin/.idx to write; where bad lines go (on_error = "skip"), if
    there are any append_eod, encoder, special_tokens
    of the tokenizer's table, by default as there ("auto") text_key, text_separator, drop,
    min_document_bytes, max_document_bytes, fix_text, on_error, max_reject_fraction      of the
    dataset's table, likewise first                  the dataset's first shard (the default):
    where gigatoken encodes, its first 200 documents are compared with tokenizers

The result: documents, empty_documents, sequences, tokens, text_bytes, lines (documents, left out
and rejected ones), left_out {reason: documents}, rejects and rejected {kind: lines}, passed_over
{reason: members of archives}, encoder and encoder_because, compared (texts, with tokenizers),
passed_on (texts that gigatoken left to tokenizers), bin_xxh128, idx_xxh128, read ([path, size,
mtime in ns, xxh128] of a file that lies here, for freshness).
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.locks import locked
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import IndexedWriter, best_dtype, idx_path
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.text.corpus import count_bytes, file_size, filter_of, open_shard, reading_of
from trainkit.data.text.formats import BadLine, SkippedMember, open_documents
from trainkit.data.text.rejects import CHECK_EVERY, Rejects
from trainkit.data.tokenize.background import read_ahead, write_behind
from trainkit.data.tokenize.encoders import (
    CheckedEncoder,
    Encoder,
    EncoderCache,
    EncoderMismatch,
    HybridEncoder,
    Ids,
    Lengths,
    with_eod,
)
from trainkit.data.tokenizer import end_of_document

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
        spec: see above.
        rejects: takes the bad lines.
    """

    def __init__(self, spec: Mapping[str, Any], rejects: Rejects) -> None:
        self.path = Path(spec["shard"])
        self.recipe = spec.get("recipe")
        self.reading = reading_of(spec)
        self.filter = filter_of(spec)
        self.rejects = rejects
        self.lines = 0
        self.passed: dict[str, int] = {}
        self.read: list[list[Any]] = []  # of a file that is here: what was read of it

    def batches(self) -> Iterator[TextBatch]:
        """All of them. Raises ConfigError (exit 6) as `open_documents` and `Rejects` do."""
        batch = TextBatch()
        if self.recipe:
            identity = []
        else:
            identity = identity_of(self.path)
        with open_shard(self.path, self.recipe) as raw:
            stream = count_bytes(raw)
            with closing(
                open_documents(self.path.name, stream, self.reading, str(self.path))
            ) as found:  # type: ignore[type-var]
                for item in found:
                    if isinstance(item, SkippedMember):
                        self.passed[item.reason] = self.passed.get(item.reason, 0) + 1
                        continue
                    self.lines += 1
                    if isinstance(item, BadLine):
                        self.rejects.add(item, found)
                    elif (parts := self.filter(item)) is not None:
                        batch.texts += parts
                        batch.sequences.append(len(parts))
                        batch.places.append((item.where, item.line))
                        batch.size += sum(map(len, parts))
                        if batch.size >= BATCH_BYTES or len(batch.places) >= BATCH_DOCUMENTS:
                            batch.position = stream.position
                            yield batch
                            batch = TextBatch()
                    if self.lines % CHECK_EVERY == 0:
                        self.rejects.check(self.lines, found)
            self.rejects.check(self.lines)
            if identity:
                if stream.position == identity[1] and stream.in_order:
                    digest = stream.digest.hexdigest()
                else:
                    digest = file_sum(self.path)
                self.read.append([*identity, digest])
            batch.position = stream.position
            if batch.places:
                yield batch


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
        if several:
            sequences = np.array(batch.sequences, np.int64)
        else:
            sequences = None
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


def write_text(spec: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Write one shard of text from its source's recipe."""
    from trainkit.data.sources import SOURCES

    return SOURCES[spec["source"]].write(spec["recipe"], Path(spec["path"]), spec["text_key"])


def write_tokens(
    spec: dict[str, Any], progress: ProgressCallback, encoders: EncoderCache
) -> dict[str, Any]:
    """Encode one shard of text to .bin/.idx: the end-of-document id after every document that
    has a token.

    An empty document becomes an entry of the document index without a sequence, as in Megatron's
    preprocess_data.py. Raises ConfigError (exit 6): see `open_documents`, `Rejects` and
    `EncoderCache`; gigatoken's ids are not those of tokenizers.
    """
    prefix = Path(spec["prefix"])
    path = Path(spec["tokenizer"])
    if spec.get("first", True):
        first = CHECK_DOCUMENTS
    else:
        first = 0
    offset = zlib.crc32(prefix.name.encode())
    special_tokens = spec.get("special_tokens", "text")
    tokenizer, encoder, choice = encoders.get(
        path, spec.get("encoder", "auto"), special_tokens, first=first, offset=offset
    )
    if spec.get("append_eod", True):
        eod = end_of_document(tokenizer, spec["eod_token"], path)
    else:
        eod = None
    dtype = best_dtype(tokenizer.get_vocab_size())
    if encoder.highest > np.iinfo(dtype).max:
        message = (
            f"{path} has {tokenizer.get_vocab_size():,} ids, which is why they are written as"
            f" {dtype.name}, but its highest is {encoder.highest:,}"
        )
        raise ConfigError(message, exit=Exit.STAGE_FAILED, hint="use a tokenizer without such gaps")
    if spec.get("rejects"):
        rejects_path = Path(spec["rejects"])
    else:
        rejects_path = None
    with (
        locked(prefix.with_name(prefix.name + ".lock"), {"shard": spec["shard"]}),
        Rejects(
            rejects_path,
            skip=spec.get("on_error", "stop") == "skip",
            max_fraction=spec.get("max_reject_fraction", 0.001),
        ) as rejects,
    ):
        reader = ShardReader(spec, rejects)
        with IndexedWriter(prefix, dtype) as pair:
            writer = ShardWriter(pair, eod)
            _run(reader, encoder, writer, spec["size"], progress)
    return {
        "documents": writer.documents,
        "empty_documents": writer.empty,
        "sequences": writer.sequences,
        "tokens": writer.tokens,
        "text_bytes": writer.text_bytes,
        "lines": reader.lines,
        "left_out": reader.filter.dropped,
        "drop_present": reader.filter.present,
        "passed_over": reader.passed,
        "rejects": rejects.total,
        "rejected": rejects.counts,
        "encoder": choice.name,
        "encoder_because": choice.because,
        "compared": encoder.compared if isinstance(encoder, CheckedEncoder) else 0,
        "passed_on": (
            encoder.fast.passed_on
            if isinstance(encoder, CheckedEncoder) and isinstance(encoder.fast, HybridEncoder)
            else 0
        ),
        "bin_xxh128": writer.hash.hexdigest(),
        "idx_xxh128": file_sum(idx_path(prefix)),
        "read": reader.read,
    }


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

    def __call__(self, spec: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
        if spec["do"] == "text":
            return write_text(spec, progress)
        return write_tokens(spec, progress, self._encoders)


if __name__ == "__main__":
    _one_arena()
    # one process a shard: the processes are the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run_unit(ShardWorker())
