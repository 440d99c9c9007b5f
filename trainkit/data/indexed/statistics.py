"""What is in prepared data: counts, lengths of documents, the most frequent tokens, and some
documents to read. Memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import INLINE, UNWRITTEN, Record
from trainkit.data.indexed.dataset import IndexedDataset

BLOCK = 2**22  # tokens looked at at once
DOCUMENTS = 2**18  # documents looked at at once
LONGEST = 2**20  # lengths are counted singly up to this; percentiles above it are "at least"
PERCENTILES = (1, 10, 50, 90, 99)
FORMATS = (".svg", ".png", ".pdf")
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class DatasetCounts:
    """How much there is."""

    documents: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class LengthBin:
    """Documents of low to high tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class FrequentToken:
    """A token and how often it occurs."""

    id: int
    text: str
    count: int


@dataclass(frozen=True)
class DocumentSample:
    """The beginning of a document."""

    pair: str
    document: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Statistics(Record):
    """What `statistics` found.

    counts: of everything.
    empty_documents: documents without a token.
    longest: tokens of the longest document.
    percentiles: {percent: tokens} of the lengths of documents; LONGEST stands for all above it.
    ids_used: how many ids occur at all, of `vocab_size`.
    occurrences: of each id, [vocab_size]; not written.
    lengths: documents by length, a power of two each.
    frequent: the most frequent tokens.
    samples: random documents.
    """

    counts: DatasetCounts = field(metadata=INLINE)
    empty_documents: int
    longest: int
    percentiles: dict[int, int]
    ids_used: int
    vocab_size: int
    occurrences: Int64 = field(metadata=UNWRITTEN)
    lengths: list[LengthBin]
    frequent: list[FrequentToken]
    samples: list[DocumentSample]


def count(prefixes: Sequence[Path]) -> DatasetCounts:
    """Documents, sequences and tokens of pairs, from their indices alone. Raises ConfigError
    (exit 6): one is damaged or not there."""
    documents = sequences = tokens = 0
    for prefix in prefixes:  # one open at a time: a process may map some 65,000 files
        pair = IndexedDataset(prefix)
        documents = documents + len(pair.document_indices) - 1
        sequences = sequences + len(pair)
        tokens = tokens + pair.num_tokens
    return DatasetCounts(documents, sequences, tokens)


def document_lengths(pair: IndexedDataset) -> Iterator[Int64]:
    """Tokens of each document, all its sequences together, in blocks."""
    indices = pair.document_indices
    for first in range(0, len(indices) - 1, DOCUMENTS):
        part = np.asarray(indices[first : first + DOCUMENTS + 1])
        ends = np.concatenate(([0], np.cumsum(pair.lengths[part[0] : part[-1]], dtype=np.int64)))
        yield np.diff(ends[part - part[0]])


class _Lengths:
    """Documents of every length up to LONGEST, and tokens by power of two."""

    def __init__(self) -> None:
        self.exact = np.zeros(LONGEST + 1, np.int64)
        # by bit length
        self.documents = np.zeros(64, np.int64)
        self.tokens = np.zeros(64, np.int64)
        self.longest = 0

    def add(self, lengths: Int64) -> None:
        self.exact += np.bincount(np.minimum(lengths, LONGEST), minlength=LONGEST + 1)
        _, bits = np.frexp(lengths)  # 0 for 0, else the bit length
        self.documents += np.bincount(bits, minlength=64)
        self.tokens += np.bincount(bits, weights=lengths, minlength=64).astype(np.int64)
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def percentiles(self) -> dict[int, int]:
        """By nearest rank: the smallest length that so many percent of the documents do not
        exceed."""
        ends = np.cumsum(self.exact)
        if ends[-1]:
            return {
                p: int(np.searchsorted(ends, -(-int(ends[-1]) * p // 100))) for p in PERCENTILES
            }
        return {}

    def bins(self) -> list[LengthBin]:
        used = np.flatnonzero(self.documents)
        rows = range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)
        return [
            LengthBin(
                2 ** (b - 1) if b else 0, 2**b - 1, int(self.documents[b]), int(self.tokens[b])
            )
            for b in rows
        ]


def statistics(
    prefixes: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    frequent: int = 20,
    samples: int = 3,
    sample_tokens: int = 80,
    seed: int = 1234,
) -> Statistics:
    """Read all of the pairs once.

    Args:
        frequent: how many of the most frequent tokens are named.
        samples: how many documents are shown, drawn from all that have a token with `seed`.
        sample_tokens: at most so many tokens of each.

    Raises ConfigError (exit 6): a pair is damaged or not there. An id above the vocabulary is
    counted, not refused: `verify` is for that.
    """
    vocab_size = tokenizer.get_vocab_size()
    lengths = _Lengths()
    occurrences = np.zeros(vocab_size, np.int64)
    counts = count(prefixes)
    for prefix in prefixes:
        pair = IndexedDataset(prefix)
        for part in document_lengths(pair):
            lengths.add(part)
        for start in range(0, pair.num_tokens, BLOCK):
            more = np.bincount(
                np.maximum(pair.tokens[start : start + BLOCK], 0), minlength=len(occurrences)
            )
            if len(more) > len(occurrences):
                occurrences = np.pad(occurrences, (0, len(more) - len(occurrences)))
            occurrences += more
    top = np.argsort(-occurrences, kind="stable")[:frequent]
    return Statistics(
        counts,
        empty_documents=int(lengths.exact[0]),
        longest=lengths.longest,
        percentiles=lengths.percentiles(),
        lengths=lengths.bins(),
        ids_used=int(np.count_nonzero(occurrences)),
        vocab_size=vocab_size,
        occurrences=occurrences,
        frequent=[
            FrequentToken(int(i), _decode(tokenizer, [int(i)]), int(occurrences[i]))
            for i in top
            if occurrences[i]
        ],
        samples=_samples(
            prefixes,
            counts.documents - int(lengths.exact[0]),
            tokenizer,
            samples,
            sample_tokens,
            seed,
        ),
    )


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _samples(
    prefixes: Sequence[Path],
    documents: int,
    tokenizer: Tokenizer,
    wanted: int,
    most: int,
    seed: int,
) -> list[DocumentSample]:
    """Documents number n of those that have a token, counted over all pairs, for random n
    without repetition."""
    if documents:
        drawn = np.sort(
            np.random.default_rng(seed).choice(documents, min(wanted, documents), replace=False)
        )
    else:
        drawn = np.empty(0, np.int64)
    found: list[DocumentSample] = []
    before = 0  # documents with a token in what was passed
    for prefix in prefixes:
        if len(found) == len(drawn):
            break
        pair = IndexedDataset(prefix)
        first = 0
        token = 0
        for lengths in document_lengths(pair):
            filled = np.flatnonzero(lengths)
            starts = token + np.cumsum(lengths) - lengths
            for number in drawn[len(found) :][drawn[len(found) :] < before + len(filled)]:
                at = filled[number - before]
                ids = pair.tokens[starts[at] : starts[at] + min(int(lengths[at]), most)]
                found.append(
                    DocumentSample(
                        prefix.name,
                        first + int(at),
                        int(lengths[at]),
                        _decode(tokenizer, ids.tolist()),
                    )
                )
            before = before + len(filled)
            first = first + len(lengths)
            token = token + int(lengths.sum())
    return found


def draw_statistics(name: str, found: Statistics, path: Path) -> None:
    """Draw the lengths of documents and how often tokens occur, by rank, into `path` (.svg, .png
    or .pdf).

    Raises ConfigError (exit 3) for another ending and without matplotlib (the extra `report`).
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        edges = [bin.low for bin in found.lengths]
        left.bar(range(len(edges)), [bin.documents for bin in found.lengths], width=0.9)
        left.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=60)
        left.set(
            xlabel="tokens of a document, at least",
            ylabel="documents",
            title=f"{name}: {found.counts.documents:,} documents",
        )
        ranked = np.sort(found.occurrences)[::-1]
        ranked = ranked[ranked > 0]
        ranks = np.unique(np.geomspace(1, max(1, len(ranked)), 400).astype(np.int64))
        right.loglog(ranks, ranked[ranks - 1] if len(ranked) else ranks * 0 + 1, linewidth=1.2)
        right.set(
            xlabel="rank of the token",
            ylabel="occurrences",
            title=f"{found.counts.tokens:,} tokens, {found.ids_used:,} of {found.vocab_size:,} ids",
        )
        right.grid(alpha=0.3)
        with atomic_open(path) as file:
            figure.savefig(
                file,
                format=path.suffix[1:],
                metadata={"Date": None} if path.suffix == ".svg" else None,
            )
