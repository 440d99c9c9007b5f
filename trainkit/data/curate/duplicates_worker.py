"""The units that find duplicates: `python -m trainkit.data.curate.duplicates_worker SPEC.json ...`

keys: each shard's documents as sorted keys. number: which numbers they have among all. join: equal
keys of all shards, a part of their range at a time, so that memory is bounded whatever the
corpus's size. cluster: of pairs, groups.

The result depends on the documents alone, not on how they lie in shards: of a group the longest
text is kept, of those the one with the least key; of equal lines and paragraphs that of the
document with the least key.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import atomic_open, write_json
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.curate.key_files import (
    DUPLICATES,
    KeyNumbers,
    Words64,
    key_range,
    open_keys,
    read_words,
    write_keys,
    write_words,
)
from trainkit.data.curate.read_back import read_shard
from trainkit.data.curate.signatures import ExactKeys, MinHashKeys, step_keys
from trainkit.data.curate.specs import ClusterSpec, JoinSpec, KeysSpec, NumberSpec
from trainkit.data.sums import file_sum, identity_of

MEMORY = 2**27  # bytes of records that are joined at once
RECORDS = 2**20  # of a file that are read at once
KEYS = 2**64
MOST_DOCUMENTS = 2**32


def write_shard_keys(spec: KeysSpec, progress: ProgressCallback) -> dict[str, object]:
    """Write a shard's key file."""
    identity = identity_of(spec.shard)
    maker: ExactKeys | MinHashKeys = step_keys(spec.step, spec.language)
    documents = array("Q")
    for number, document in enumerate(read_shard(spec.shard, spec.text_key)):
        documents.extend((document.key, len(document.text)))
        maker.add(number, document)
        if number % 256 == 0:
            progress(min(number, 2**20), 2**20)
    write_keys(spec.output, np.array(documents, np.uint64).reshape(-1, 2), maker.records())
    read = (str(spec.shard), *identity[1:], file_sum(spec.shard))
    return {"documents": len(documents) // 2, "read": [read]}


def _lows(spec: JoinSpec, records: int) -> Words64:
    """Where the ranges begin that the unit's part of all keys is joined in: each fits into memory.
    Keys are hashes, so that ranges of a size hold as many."""
    low = KEYS * spec.part // spec.parts
    high = KEYS * (spec.part + 1) // spec.parts
    columns = 2 if spec.edges else 3
    count = -(-records * columns * 8 // spec.parts // MEMORY) or 1
    return np.array([low + (high - low) * i // count for i in range(count)], np.uint64)


def _sections(spec: JoinSpec, numbers: KeyNumbers) -> Iterator[list[Words64]]:
    """The unit's part of the records of all shards, documents numbered through: sorted sections,
    in lists of about `MEMORY` bytes. Files are opened one after another: there may be more than a
    process may hold."""
    low, high = (KEYS * (spec.part + end) // spec.parts - end for end in (0, 1))
    sections: list[Words64] = []
    size = 0
    for path, first in zip(numbers.paths, numbers.firsts, strict=False):
        records = key_range(open_keys(path).records[spec.band], low, high)
        for at in range(0, len(records), RECORDS):
            section = np.array(records[at : at + RECORDS])
            section[:, -1] += np.uint64(first)
            sections.append(section)
            size += section.nbytes
            if size >= MEMORY:
                yield sections
                sections = []
                size = 0
    yield sections


def _lay_down(
    spec: JoinSpec, numbers: KeyNumbers, lows: Words64, scratch: IO[bytes]
) -> list[list[tuple[int, int]]]:
    """Write the records of each range side by side, as far as `_sections` have them together.
    Returns where those of each range are: (first byte, bytes) of each part."""
    places: list[list[tuple[int, int]]] = [[] for _ in lows]
    for sections in _sections(spec, numbers):
        cuts = [np.append(np.searchsorted(each[:, 0], lows), len(each)) for each in sections]
        for number, found in enumerate(places):
            begin = scratch.tell()
            for section, cut in zip(sections, cuts, strict=True):
                scratch.write(section[cut[number] : cut[number + 1]].data)
            found.append((begin, scratch.tell() - begin))
    return places


def _gather(
    spec: JoinSpec, numbers: KeyNumbers, lows: Words64, scratch: IO[bytes]
) -> Iterator[Words64]:
    """The records of each range. A file is read once, however many ranges there are."""
    for found in _lay_down(spec, numbers, lows, scratch):
        whole = bytearray(sum(size for _, size in found))
        done = 0
        for begin, size in found:
            scratch.seek(begin)
            whole[done : done + size] = scratch.read(size)
            done += size
        yield np.frombuffer(whole, np.uint64).reshape(-1, 2 if spec.edges else 3)


def _groups(keys: Words64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of sorted keys: where each one's group begins, and how many are in it: int64 [n] each."""
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    counts = np.diff(np.append(starts, len(keys)))
    return np.repeat(starts, counts), np.repeat(counts, counts)


def join(spec: JoinSpec, progress: ProgressCallback) -> dict[str, object]:
    """Find equal keys in the unit's part."""
    numbers = KeyNumbers.from_file(spec.numbers_file)
    lows = _lows(spec, numbers.records)
    found = [np.zeros((0, DUPLICATES), np.uint64)]
    count = 0
    with atomic_open(spec.output) as file, TemporaryFile(dir=spec.output.parent) as scratch:
        for number, records in enumerate(_gather(spec, numbers, lows, scratch)):
            if len(records) and spec.edges:
                rows = _pairs(records)
                file.write(rows.astype("<u8", copy=False).tobytes())  # in no order
                count += len(rows)
            elif len(records):
                found.append(_later(records, numbers.first_own))
            progress(number + 1, len(lows))
        rows = np.concatenate(found)
        file.write(rows[np.argsort(rows[:, 0], kind="stable")].astype("<u8").tobytes())
    return {"pairs": count + len(rows), "read": []}


def _pairs(records: Words64) -> Words64:
    """(least document of a group, another of it) for records (key, document)."""
    records = records[np.lexsort((records[:, 1], records[:, 0]))]
    starts, counts = _groups(records[:, 0])
    others = np.flatnonzero((counts > 1) & (np.arange(len(records)) != starts))
    return np.stack([records[starts[others], 1], records[others, 1]], axis=1)


def _later(records: Words64, ours: int) -> Words64:
    """`Duplicates` of records (key, document's key, document): all of a group but the first, by
    (another dataset's, document's key)."""
    own = records[:, 2] >= np.uint64(ours)
    records = records[np.lexsort((records[:, 2], records[:, 1], own, records[:, 0]))]
    starts, counts = _groups(records[:, 0])
    kept = records[starts, 2]
    # a text that stands twice in the document that keeps it is that document's matter
    others = np.flatnonzero((records[:, 2] != kept) & (records[:, 2] >= np.uint64(ours)))
    rows = records[others]
    return np.stack(
        [rows[:, 2], rows[:, 0], kept[others], counts[others].astype(np.uint64)], axis=1
    )


def cluster(spec: ClusterSpec, progress: ProgressCallback) -> dict[str, object]:
    """Find groups of documents that pairs join, and in each the one that is kept. Memory: 24
    bytes a document, in files that the kernel may write back."""
    numbers = KeyNumbers.from_file(spec.numbers_file)
    count = numbers.firsts[-1]
    if count >= MOST_DOCUMENTS:
        raise ConfigError(
            f"{count:,} documents are to be compared, but 2^32 - 1 can be",
            exit=Exit.STAGE_FAILED,
            hint="make two datasets of them, the second with against = [the first]",
        )
    with TemporaryFile(dir=spec.output.parent) as scratch:
        parents = _scratch(scratch, count)
        parents[:] = np.arange(count, dtype=np.uint32)
        for done, path in enumerate(spec.edges):
            edges = read_words(path, 2)
            for start in range(0, len(edges), 2**22):
                _index.unite(parents, np.ascontiguousarray(edges[start : start + 2**22]))
            progress(done + 1, len(spec.edges) + 1)
        _index.find_roots(parents)
        rows = _left_out(parents, numbers)
    write_words(spec.output, rows)
    return {"duplicates": len(rows), "read": []}


def _scratch(file: Any, count: int) -> NDArray[np.uint32]:
    # a full disk is an error here, not a signal when a page is first written
    os.posix_fallocate(file.fileno(), 0, max(4, 4 * count))
    whole: NDArray[np.uint32] = np.memmap(file, np.uint32, "r+", shape=(max(1, count),))
    return whole[:count]


def _left_out(parents: NDArray[np.uint32], numbers: KeyNumbers) -> Words64:
    """`Duplicates` of all groups of two documents or more, sorted by document."""
    nodes = np.flatnonzero(parents != np.arange(len(parents), dtype=np.uint32))
    members = np.unique(np.concatenate([nodes, parents[nodes].astype(np.int64)]))
    if not len(members):
        return np.zeros((0, DUPLICATES), np.uint64)
    facts = np.zeros((len(members), 2), np.uint64)
    ours = numbers.first_own
    firsts = numbers.firsts
    places = np.searchsorted(members, firsts)
    for path, first, low, high in zip(numbers.paths, firsts, places, places[1:], strict=False):
        if high > low:
            facts[low:high] = open_keys(path).documents[members[low:high] - first]
    roots = parents[members]
    length = np.iinfo(np.uint64).max - facts[:, 1]
    order = np.lexsort((members, facts[:, 0], length, members >= ours, roots))
    starts, counts = _groups(roots[order].astype(np.uint64))
    kept = members[order][starts]
    numbered = members[order]
    rows: Words64 = np.stack([numbered, 0 * numbered, kept, counts], axis=1).astype(np.uint64)
    rows = rows[(numbered != kept) & (numbered >= ours)]
    return rows[np.argsort(rows[:, 0], kind="stable")]


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """What `value["do"]` names."""
    if value["do"] == "keys":
        return write_shard_keys(KeysSpec.from_json(value), progress)
    if value["do"] == "number":
        spec = NumberSpec.from_json(value)
        numbers = KeyNumbers.count(spec.against, spec.keys)
        write_json(spec.output, numbers.to_json())
        read = [identity_of(path)[:3] for path in spec.against]  # they may be large: no sums
        return {"documents": numbers.firsts[-1], "read": [(*each, None) for each in read]}
    if value["do"] == "join":
        return join(JoinSpec.from_json(value), progress)
    return cluster(ClusterSpec.from_json(value), progress)


if __name__ == "__main__":
    run_unit(work)
