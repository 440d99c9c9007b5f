"""Documents written in a random order, by two passes over the disk: data larger than memory is
read and written in long stretches only.

Document d of N, counted through all pairs, comes to place P(d), P the permutation of
`trainkit._index.permute`: nothing has to be drawn or kept. The places are cut into buckets that
fit memory. The first pass reads the pairs from begin to end and appends every document to its
bucket, the second reads bucket after bucket and writes its documents by place. Where the cuts
lie, and so how much memory there is, does not change the result.

The buckets are stretches of one unnamed temporary file beside the output, which is gone with the
process however that ends.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import names_full_file
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.indexed.paths import bin_path, idx_path

Numbers = NDArray[np.int64]

# bytes of working arrays for a document and for a sequence, beside the tokens
DOCUMENT_COST = 160
SEQUENCE_COST = 32
MINIMUM_MEMORY = 2**12
# places, sequences a document, their lengths, tokens
BUCKET: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, ("i8", "i8", "i4", "u1")))


def shuffle_documents(
    prefixes: Sequence[Path],
    out_prefix: Path,
    seed: int,
    memory_bytes: int = 2**30,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write all documents of several .bin/.idx pairs into one, in an order that depends on the
    seed, their number and the order of `prefixes`.

    The tokens take room on disk twice until the end. With B bytes of them and M of memory the
    pieces of a bucket have about M^2 / (9 B) bytes: 128 KB for 1 TB and 1 GiB, so give large
    data more.

    Args:
        prefixes: the pairs, without .bin and .idx; of one dtype. Documents may have several
            sequences, or none.
        out_prefix: the pair to write: whole or absent, see `IndexedWriter`.
        seed: salts the permutation's key.
        memory_bytes: of buffers. Beside them a document takes 16 bytes, and a sequence more than
            one a document 4.
        progress: is called with the steps done, and of how many.

    Raises:
        ConfigError (exit 6): no prefix; a pair that cannot be read, is damaged, has another
        dtype than the first, or is multimodal. ConfigError: less than 4 KiB of memory.
    """
    if memory_bytes < MINIMUM_MEMORY:
        raise ConfigError(
            f"{memory_bytes} bytes of memory are too few to shuffle documents",
            hint=f"give {MINIMUM_MEMORY} or more",
        )
    pairs = _open(prefixes, Path(out_prefix))
    # tokens as they were read, the same by bucket, and the arrays to sort them
    buckets = _Buckets(pairs, seed, memory_bytes // 3)
    done = 0
    with (
        IndexedWriter(out_prefix, pairs[0].dtype) as writer,
        names_full_file(Path(out_prefix)),
        tempfile.TemporaryFile(dir=Path(out_prefix).parent) as file,
    ):
        for step in (buckets.fill, buckets.empty):
            for documents in step(file, writer):
                done += documents
                progress(done, 2 * buckets.documents)


def _open(prefixes: Sequence[Path], out_prefix: Path) -> list[IndexedDataset]:
    if not prefixes:
        raise ConfigError(
            f"{out_prefix}: there is nothing to shuffle",
            exit=Exit.STAGE_FAILED,
            hint="the dataset has no shard",
        )
    pairs = [IndexedDataset(Path(prefix)) for prefix in prefixes]
    for data in pairs:
        path = idx_path(data.prefix)
        first = pairs[0]
        if data.dtype != first.dtype:
            raise ConfigError(
                f"{path}: holds {data.dtype.name}, but {first.prefix.name} is of"
                f" {first.dtype.name}",
                exit=Exit.STAGE_FAILED,
                hint="shuffle files of one tokenizer only",
            )
        if data.modes is not None:
            raise ConfigError(
                f"{path}: is multimodal", exit=Exit.STAGE_FAILED, hint="trainkit shuffles text only"
            )
        data.verify()
    return pairs


@dataclass(frozen=True)
class _Documents:
    """Consecutive documents of one pair: `sequences` and `sizes` (bytes) of each document,
    `lengths` of all their sequences."""

    data: IndexedDataset
    number: int  # of the first, counted through all pairs
    begin: int  # where their tokens begin in .bin, in bytes
    sequences: Numbers
    sizes: Numbers
    lengths: NDArray[np.int32]

    @property
    def costs(self) -> Numbers:
        """Memory for each, in bytes."""
        return self.sizes + self.sequences * SEQUENCE_COST + DOCUMENT_COST

    def part(self, low: int, high: int) -> _Documents:
        """Documents low .. high - 1 of these."""
        first = int(self.sequences[:low].sum())
        last = int(self.sequences[:high].sum())
        begin = self.begin + int(self.sizes[:low].sum())
        return _Documents(
            self.data,
            self.number + low,
            begin,
            self.sequences[low:high],
            self.sizes[low:high],
            self.lengths[first:last],
        )

    def alone(self, i: int) -> _Documents:
        """Document i, which keeps nothing of the others in memory."""
        one = self.part(i, i + 1)
        return replace(one, sequences=one.sequences.copy(), sizes=one.sizes.copy())


def _scan(pairs: Sequence[IndexedDataset], limit: int) -> Iterator[_Documents]:
    """All documents in order, in blocks whose working arrays, without the tokens, cost `limit`
    at most, or of one document."""
    number = 0
    for data in pairs:
        bounds = data.document_indices
        begin = 0
        first = 0
        while first < len(bounds) - 1:
            ahead = bounds[first : first + max(1, limit // DOCUMENT_COST) + 1]
            last = first + max(
                1, int(np.searchsorted(ahead, ahead[0] + limit // SEQUENCE_COST, "right")) - 1
            )
            lengths = data.lengths[bounds[first] : bounds[last]]
            sizes = (
                np.diff(_starts(lengths)[bounds[first : last + 1] - bounds[first]])
                * data.dtype.itemsize
            )
            yield _Documents(data, number, begin, np.diff(bounds[first : last + 1]), sizes, lengths)
            number = number + last - first
            begin = begin + int(sizes.sum())
            first = last


class _Buckets:
    """Where the documents go, and the way into the buckets and out again.

    Args:
        pairs: the documents.
        seed: of their order.
        limit: bytes that a bucket, and the documents read at once, may cost. A document that costs
            more is a bucket of its own and copied from its pair.
    """

    def __init__(self, pairs: Sequence[IndexedDataset], seed: int, limit: int) -> None:
        self.pairs = pairs
        self.limit = limit
        self.documents = sum(len(data.document_indices) - 1 for data in pairs)
        text = f"trainkit-shuffle/1 {seed} {self.documents}"
        self.key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.large: dict[int, _Documents] = {}  # by place
        self.firsts = self._cut()  # place of each bucket's first document
        # in the temporary file, of each bucket and kind of data: int64 [buckets, 4]
        self.begins = self._lay_out()
        self.ends = self.begins.copy()  # of what is written

    def fill(self, file: BinaryIO, writer: IndexedWriter) -> Iterator[int]:
        """The first pass: all documents to their buckets. Yields the documents of each step."""
        for block in _scan(self.pairs, self.limit):
            with open(bin_path(block.data.prefix), "rb") as source:
                for low, high in _fitting(block.costs, self.limit):
                    documents = block.part(low, high)
                    places = self._places(documents)
                    if int(places[0]) not in self.large:  # such a one comes alone
                        source.seek(documents.begin)
                        self._fill(
                            file, documents, places, _read(source, int(documents.sizes.sum()))
                        )
                    yield high - low

    def empty(self, file: BinaryIO, writer: IndexedWriter) -> Iterator[int]:
        """The second pass: bucket after bucket to the writer. Yields the documents of each step."""
        for bucket, first in enumerate(self.firsts.tolist()):
            if (alone := self.large.get(first)) is not None:
                begin = alone.begin // writer.dtype.itemsize
                writer.add_document(
                    alone.data.tokens[begin : begin + int(alone.sizes[0]) // writer.dtype.itemsize],
                    alone.lengths.tolist(),
                )
                yield 1
            else:
                yield from self._empty(bucket, first, file, writer)

    def _places(self, documents: _Documents) -> Numbers:
        places = np.empty(len(documents.sizes), np.int64)
        _index.permute(self.documents, self.key, documents.number, places)
        return places

    def _cut(self) -> Numbers:
        """First places such that no bucket costs more than the limit, unless it is one document.
        Takes 16 bytes a document while it works."""
        costs = np.empty(self.documents, np.int64)
        for documents in _scan(self.pairs, self.limit):
            places = self._places(documents)
            here = documents.costs
            costs[places] = here
            for i in np.flatnonzero(here > self.limit).tolist():
                self.large[int(places[i])] = documents.alone(i)
        return np.array([low for low, _ in _fitting(costs, self.limit)], np.int64)

    def _lay_out(self) -> Numbers:
        """Stretches of the temporary file; those of large documents stay empty and take no room."""
        counts = np.diff(np.append(self.firsts, self.documents))
        sizes = np.stack([counts, counts, np.zeros_like(counts), np.zeros_like(counts)], axis=1) * [
            dtype.itemsize for dtype in BUCKET
        ]
        for documents in _scan(self.pairs, self.limit):
            buckets = self._buckets(self._places(documents))
            np.add.at(sizes[:, 2], buckets, documents.sequences * BUCKET[2].itemsize)
            np.add.at(sizes[:, 3], buckets, documents.sizes)
        return _starts(sizes.ravel())[:-1].reshape(sizes.shape)

    def _buckets(self, places: Numbers) -> Numbers:
        return np.searchsorted(self.firsts, places, "right") - 1

    def _fill(
        self, file: BinaryIO, documents: _Documents, places: Numbers, tokens: NDArray[np.uint8]
    ) -> None:
        """Append documents to their buckets."""
        buckets = self._buckets(places)
        order = np.argsort(buckets, kind="stable")
        sequences = documents.sequences[order]
        sizes = documents.sizes[order]
        lengths = _rearranged(np.ascontiguousarray(documents.lengths), documents.sequences, order)
        parts = (places[order], sequences, lengths, _rearranged(tokens, documents.sizes, order))
        present, lows = np.unique(buckets[order], return_index=True)
        lows = np.append(lows, len(order))
        cuts = np.stack([lows, lows, _starts(sequences)[lows], _starts(sizes)[lows]], axis=1)
        for bucket, low, high in zip(
            present.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True
        ):
            for kind, part in enumerate(parts):
                piece = part[low[kind] : high[kind]]
                file.seek(int(self.ends[bucket, kind]))
                file.write(piece.data)
                self.ends[bucket, kind] += piece.nbytes

    def _empty(
        self, bucket: int, first: int, file: BinaryIO, writer: IndexedWriter
    ) -> Iterator[int]:
        """Write the documents of one bucket by place."""
        parts: list[NDArray[Any]] = []
        for kind, dtype in enumerate(BUCKET):
            file.seek(int(self.begins[bucket, kind]))
            parts.append(
                _read(file, int(self.ends[bucket, kind] - self.begins[bucket, kind])).view(dtype)
            )
        places, sequences, lengths, tokens = parts
        order = np.empty(len(places), np.int64)
        order[places - first] = np.arange(len(places))
        # of each document in `tokens`, and the end
        starts = _starts(lengths)[_starts(sequences)] * writer.dtype.itemsize
        lengths = _rearranged(lengths, sequences, order)
        sequences = sequences[order]
        sizes = np.diff(starts)[order]
        starts = starts[:-1][order]
        sequence_starts = _starts(sequences)
        plain = sequences == (sizes > 0)  # one sequence, or empty: these go many at once
        for low, high in _runs(plain, sizes, self.limit // 2):
            part = np.empty(int(sizes[low:high].sum()), np.uint8)
            _index.gather(tokens, starts[low:high], sizes[low:high], part)
            if plain[low]:
                writer.add_documents(
                    part.view(writer.dtype), sizes[low:high] // writer.dtype.itemsize
                )
            else:
                writer.add_document(
                    part.view(writer.dtype),
                    lengths[sequence_starts[low] : sequence_starts[high]].tolist(),
                )
            yield high - low


def _read(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The next `size` bytes."""
    content = np.empty(size, np.uint8)
    if file.readinto(content.data) != size:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{file.name} became shorter while it was read",
            exit=Exit.STAGE_FAILED,
            hint="prepare the data again",
        )
    return content


def _starts(sizes: NDArray[Any]) -> Numbers:
    """Where each of consecutive things begins, and the end: int64 [n + 1]."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _fitting(sizes: Numbers, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of things that have `limit` bytes together at most, or one thing that
    has more."""
    ends = np.cumsum(sizes)
    low = 0
    before = 0
    while low < len(ends):
        high = max(low + 1, int(np.searchsorted(ends, before + limit, "right")))
        yield low, high
        low = high
        before = int(ends[high - 1])


def _runs(plain: NDArray[np.bool_], sizes: Numbers, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of plain documents that fit `limit`, and each other document for
    itself."""
    low = 0
    for stop in [*np.flatnonzero(~plain).tolist(), len(plain)]:
        for first, last in _fitting(sizes[low:stop], limit):
            yield low + first, low + last
        if stop < len(plain):
            yield stop, stop + 1
        low = stop + 1


def _rearranged(values: NDArray[Any], counts: Numbers, order: Numbers) -> NDArray[Any]:
    """Groups of `counts` consecutive values in another order of the groups."""
    out = np.empty_like(values)
    size = values.dtype.itemsize
    _index.gather(
        values.view(np.uint8),
        _starts(counts)[:-1][order] * size,
        counts[order] * size,
        out.view(np.uint8),
    )
    return out
