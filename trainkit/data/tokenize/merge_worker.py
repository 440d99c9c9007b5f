"""The last unit of prep-data: token shards joined into one .bin/.idx, or left as they are, and
the dataset's manifest.

Where every byte goes is known from the shards' indices, so all of it is written at once: tokens
by the kernel (copy_file_range(2), which on some file systems copies nothing at all), the index
by numpy in blocks. Memory does not grow with the corpus.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import (
    fsync_folder,
    names_full_file,
    remove_leftovers,
    temporary_name,
    write_json,
)
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import CODES, IndexedDataset
from trainkit.data.indexed.format import CHUNK, HEADER, MAGIC, VERSION
from trainkit.data.indexed.manifest import (
    ShardResult,
    check_declared,
    check_drop,
    ranges_path,
    read_results,
    write_manifest,
)
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.sums import identity_of
from trainkit.data.unit_specs import MergeSpec

PIECE = 2**28  # bytes of .bin that one thread copies before it takes the next
BUFFER = 2**23  # where the kernel cannot copy
CANNOT_COPY = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
MOST_THREADS = 16
MOST_OPEN = 200  # pairs that are shuffled as they are
SEED = 1234  # of the order of documents
SHUFFLE_MEMORY = 2**30


@dataclass(frozen=True)
class PairSlice:
    """A pair, or so many sequences and documents of one from the given ones on: a shard that was
    merged before."""

    prefix: Path
    from_sequence: int = 0
    sequences: int | None = None
    from_document: int = 0
    documents: int | None = None


@dataclass(frozen=True)
class _Placement:
    """Where a part goes: what stands before it in the merged pair; and where it lies in its own."""

    prefix: Path
    sequences: int
    documents: int
    size: int
    first_sequence: int
    first_document: int
    first_byte: int
    from_sequence: int
    from_document: int
    from_byte: int


class _Layout:
    """The merged pair before it is written. Opens every pair once, which checks it; holds one of
    them open."""

    def __init__(self, parts: Sequence[PairSlice], out_prefix: Path) -> None:
        if not parts:
            raise ConfigError(
                f"{out_prefix}: there is nothing to merge",
                exit=Exit.STAGE_FAILED,
                hint="the dataset has no shard",
            )
        self.places: list[_Placement] = []
        self.sequences = self.documents = self.size = 0
        dtype: np.dtype[Any] | None = None
        pair: IndexedDataset | None = None
        for part in parts:
            prefix = part.prefix
            if pair is None or pair.prefix != prefix:
                pair = IndexedDataset(prefix)
                pair.verify()
            if dtype is None:
                dtype = pair.dtype
            if pair.dtype != dtype:
                raise ConfigError(
                    f"{idx_path(prefix)} holds {pair.dtype.name}, but"
                    f" {idx_path(parts[0].prefix).name} {dtype.name}",
                    exit=Exit.STAGE_FAILED,
                    hint="merge files of one tokenizer only",
                )
            if pair.modes is not None:
                raise ConfigError(
                    f"{idx_path(prefix)} is multimodal",
                    exit=Exit.STAGE_FAILED,
                    hint="trainkit merges text only",
                )
            place = self._place(part, pair)
            self.places.append(place)
            self.sequences = self.sequences + place.sequences
            self.documents = self.documents + place.documents
            self.size = self.size + place.size
        assert dtype is not None
        self.dtype = dtype
        self.offsets_at = HEADER.size + 4 * self.sequences
        self.documents_at = HEADER.size + 12 * self.sequences

    def _place(self, part: PairSlice, pair: IndexedDataset) -> _Placement:
        sequences = len(pair) if part.sequences is None else part.sequences
        documents = pair.num_documents if part.documents is None else part.documents
        last = part.from_sequence + sequences
        if (
            last > len(pair)
            or part.from_document + documents > pair.num_documents
            or pair.document_indices[part.from_document] != part.from_sequence
        ):
            raise ConfigError(
                f"{idx_path(part.prefix)} does not hold the sequences {part.from_sequence:,} to"
                f" {last:,} as its dataset.json says",
                exit=Exit.STAGE_FAILED,
                hint="make it again: --force",
            )
        lengths = pair.lengths[part.from_sequence : last]
        size = int(lengths.sum(dtype=np.int64)) * pair.dtype.itemsize
        from_byte = int(pair.offsets[part.from_sequence]) if sequences else 0
        counts = sequences, documents, size
        return _Placement(
            part.prefix,
            *counts,
            self.sequences,
            self.documents,
            self.size,
            part.from_sequence,
            part.from_document,
            from_byte,
        )

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.documents + 1)


def merge_pairs(
    pairs: Sequence[PairSlice | Path],
    out_prefix: Path,
    *,
    threads: int = 1,
    progress: ProgressCallback = lambda done, total: None,
    before: Callable[[tuple[Path, Path]], None] = lambda names: None,
) -> None:
    """Join pairs in the given order into one, byte for byte as Megatron's add_index does; it is
    there whole or not at all.

    Args:
        pairs: prefixes, or parts of pairs; one may be a part of what stands at `out_prefix` so far.
        threads: copies at once; each takes at most 8 MiB, whatever the sizes.
        progress: given bytes of .bin.
        before: given the whole .bin and .idx before they get their names.

    Raises ConfigError (exit 6): no prefix is given, a pair is damaged, dtypes differ or one is
    multimodal. OSError as writing does.
    """
    layout = _Layout(
        [pair if isinstance(pair, PairSlice) else PairSlice(pair) for pair in pairs], out_prefix
    )
    out_prefix.parent.mkdir(parents=True, exist_ok=True)
    names = temporary_name(bin_path(out_prefix)), temporary_name(idx_path(out_prefix))
    try:
        with _created(names[0]) as tokens, _created(names[1]) as index:
            os.ftruncate(tokens, layout.size)
            _write(index, layout.header(), 0)
            _write(index, bytes(8), layout.documents_at)  # the first document begins at sequence 0
            _copy_all(layout, tokens, index, threads, progress)
        before(names)
        _publish(names, out_prefix)
    finally:
        for name in names:
            name.unlink(missing_ok=True)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with names_full_file(path):
            yield handle
            os.fsync(handle)
    finally:
        os.close(handle)


def _copy_all(
    layout: _Layout, tokens: int, index: int, threads: int, progress: ProgressCallback
) -> None:
    """Everything but the header, in parallel. The first failure, or Ctrl-C, ends it after the
    pieces at hand."""
    jobs: list[Callable[[], int]] = []
    for place in layout.places:
        jobs.append(lambda place=place: _write_index(layout, place, index))  # type: ignore[misc]
        for start in range(0, place.size, PIECE):
            jobs.append(lambda place=place, start=start: _copy(place, start, tokens))  # type: ignore[misc]
    done = 0
    pool = ThreadPoolExecutor(threads, "merge")
    try:
        for first in range(0, len(jobs), 16 * threads):  # not 60,000 futures at once
            futures = [pool.submit(job) for job in jobs[first : first + 16 * threads]]
            wait(futures, return_when=FIRST_EXCEPTION)
            done += sum(future.result() for future in futures)
            progress(done, max(1, layout.size))
    finally:
        pool.shutdown(cancel_futures=True)


def _copy(place: _Placement, start: int, target: int) -> int:
    """Copy a piece of a shard's .bin; returns its bytes."""
    path = bin_path(place.prefix)
    size = min(PIECE, place.size - start)
    with open(path, "rb", buffering=0) as source:
        done = _copy_in_kernel(
            source.fileno(), target, place.from_byte + start, place.first_byte + start, size
        )
        while done < size:
            block = os.pread(
                source.fileno(), min(BUFFER, size - done), place.from_byte + start + done
            )
            if not block:
                raise ConfigError(
                    f"{path} became shorter while it was read",
                    exit=Exit.STAGE_FAILED,
                    hint="prepare the data again",
                )
            _write(target, block, place.first_byte + start + done)
            done += len(block)
    return size


def _copy_in_kernel(source: int, target: int, start: int, at: int, size: int) -> int:
    """Bytes that copy_file_range copied: all, or none further where the file system cannot."""
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, target, size - done, start + done, at + done)
        except OSError as error:
            if error.errno in CANNOT_COPY:
                return done
            raise
        if count == 0:  # some file systems say so instead of an error
            return done
        done += count
    return done


def _write(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(handle, view, at)
        view = view[written:]
        at = at + written


def _write_array(handle: int, values: NDArray[Any], dtype: DTypeLike, at: int) -> None:
    if len(values):
        _write(handle, np.ascontiguousarray(values, dtype).data, at)


def _write_index(layout: _Layout, place: _Placement, index: int) -> int:
    """Write a shard's lengths, offsets and documents to their places in the merged index;
    returns 0 bytes of .bin."""
    pair = IndexedDataset(place.prefix)
    position = place.first_byte
    for first in range(0, place.sequences, CHUNK):
        start = place.from_sequence + first
        lengths = pair.lengths[start : min(start + CHUNK, place.from_sequence + place.sequences)]
        sequence = place.first_sequence + first
        ends = position + np.cumsum(lengths, dtype=np.int64) * layout.dtype.itemsize
        _write_array(index, lengths, "<i4", HEADER.size + 4 * sequence)
        _write_array(
            index, np.concatenate(([position], ends[:-1])), "<i8", layout.offsets_at + 8 * sequence
        )
        position = int(ends[-1])
    for first in range(1, place.documents + 1, CHUNK):
        start = place.from_document + first
        found = pair.document_indices[
            start : min(start + CHUNK, place.from_document + place.documents + 1)
        ]
        documents = found - place.from_sequence + place.first_sequence
        _write_array(
            index, documents, "<i8", layout.documents_at + 8 * (place.first_document + first)
        )
    return 0


def _publish(names: tuple[Path, Path], prefix: Path) -> None:
    """Rename both: an .idx that is there always belongs to its .bin, also after SIGKILL."""
    with contextlib.suppress(FileNotFoundError):
        idx_path(prefix).unlink()
        fsync_folder(prefix.parent)
    os.replace(names[0], bin_path(prefix))
    fsync_folder(prefix.parent)
    os.replace(names[1], idx_path(prefix))
    fsync_folder(prefix.parent)


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Merge, or shuffle, or leave the shards alone as a `MergeSpec` says; then write
    dataset.json.

    Returns the dataset's counts. Raises ConfigError (exit 6) as `merge_pairs` and `check_declared`.
    """
    spec = MergeSpec.from_json(value)
    shards = read_results(spec)
    _refuse_no_token(spec, shards)
    check_declared(spec.name, spec.declared, shards)
    check_drop(spec.name, shards)
    prefixes = [shard.prefix for shard in spec.shards]
    if spec.prefix is not None:
        if spec.shuffle:
            _shuffle(prefixes, spec.prefix, progress)
        else:
            _merge(spec, spec.prefix, shards, progress)
    counts = write_manifest(spec, shards)
    if spec.prefix is not None:
        ranges_path(spec.prefix).unlink(missing_ok=True)
        remove_leftovers(ranges_path(spec.prefix))  # of a merge that was killed as it wrote them
    _tidy(
        prefixes[0].parent,
        {f"{prefix.name}{ending}" for prefix in prefixes for ending in (".bin", ".idx", ".lock")},
    )
    with_rejects = {
        f"{given.name}.jsonl"
        for given, shard in zip(spec.shards, shards, strict=True)
        if shard.tokens.rejects
    }
    _tidy(spec.rejects, with_rejects)
    progress(1, 1)
    return counts.to_json()


def _refuse_no_token(spec: MergeSpec, shards: Sequence[ShardResult]) -> None:
    if any(shard.tokens.tokens for shard in shards):
        return
    left_out = sum(sum(shard.tokens.left_out.values()) for shard in shards)
    raise ConfigError(
        f"datasets.{spec.name}: {len(shards):,} files hold no token ({left_out:,} documents"
        " were left out)",
        exit=Exit.STAGE_FAILED,
        hint="look at the files, at text_key, and at what is left out (drop, min_document_bytes)",
    )


def _merge(
    spec: MergeSpec, target: Path, shards: Sequence[ShardResult], progress: ProgressCallback
) -> None:
    def note(names: tuple[Path, Path]) -> None:
        made_of = [
            [given.name, shard.tokens.sequences, shard.tokens.documents]
            for given, shard in zip(spec.shards, shards, strict=True)
        ]
        pair = [list(identity_of(name)[1:]) for name in names]
        write_json(ranges_path(target), {"pair": pair, "shards": made_of})

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    slices = _slices(spec, target)
    merge_pairs(slices, target, threads=threads, progress=progress, before=note)


def _slices(spec: MergeSpec, target: Path) -> list[PairSlice]:
    """Where each shard lies: in its own pair, or, where that is not there, in what was merged
    before, which must be what it was when that was planned.

    Raises ConfigError (exit 6): it is another one now.
    """
    slices = []
    for shard in spec.shards:
        pair = bin_path(shard.prefix), idx_path(shard.prefix)
        # one of the two alone was left by a task that was killed as it deleted them
        if shard.kept is None or all(path.is_file() for path in pair):
            slices.append(PairSlice(shard.prefix))
        else:
            slices.append(PairSlice(target, *shard.kept))
    reused = any(each.prefix == target for each in slices)
    files = (bin_path(target), idx_path(target))
    if reused and [list(identity_of(path)) for path in files] != list(spec.former):
        raise ConfigError(
            f"{bin_path(target)} is not what it was when this was planned: another process wrote it"
            " meanwhile",
            exit=Exit.STAGE_FAILED,
            hint="run it again",
        )
    return slices


def _shuffle(prefixes: Sequence[Path], target: Path, progress: ProgressCallback) -> None:
    """All documents in one random order. Many shards are joined first, for shuffling holds every
    pair open; the order is the same."""
    from trainkit.data.tokenize.shuffle import shuffle_documents

    if len(prefixes) <= MOST_OPEN:
        shuffle_documents(prefixes, target, SEED, SHUFFLE_MEMORY, progress)
        return
    joined = target.with_name(f"{target.name}.joined")
    try:
        merge_pairs(prefixes, joined, threads=min(MOST_THREADS, len(os.sched_getaffinity(0))))
        shuffle_documents([joined], target, SEED, SHUFFLE_MEMORY, progress)
    finally:
        for path in (bin_path(joined), idx_path(joined)):
            path.unlink(missing_ok=True)


def _tidy(folder: Path, known: set[str]) -> None:
    """Delete files that shards of a former dataset.json, or workers that were killed, left in a
    folder of ours."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.name not in known and entry.is_file(follow_symlinks=False):
            os.unlink(entry)


if __name__ == "__main__":
    run_unit(work)
