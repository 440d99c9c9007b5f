"""Megatron's sample order, bit for bit: document, sample and shuffle index of one split of one
dataset.

Megatron-core 0.16, core/datasets/gpt_dataset.py, trains on samples as follows. The unit is the
sequence of .idx, called document here.

    document index   E copies of the split's document ids, shuffled together; the last copy by
    itself if less than 80 % of it is needed sample index     row k: where sample k begins,
    (position in the document index, token offset); samples run across documents shuffle index
    the numbers of the samples, shuffled; those of a separate last copy by themselves

All shuffles draw from one numpy RandomState(seed). `build_index` writes the three arrays under
the names of Megatron's own cache, `MegatronIndex` maps them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.format import HEADER, data_error
from trainkit.data.indexed.paths import idx_path
from trainkit.data.order.megatron_cache import (
    CacheNames,
    TokenizerIdentifiers,
    check_index_mark,
    describe_index,
    map_array,
    npy_file,
    split_matrix,
    write_index_files,
)
from trainkit.data.order.native import SplitName

Numbers = NDArray[np.integer[Any]]

SCHEMA = "megatron-index/1"
DOCUMENTS = "document_index.npy"
SAMPLES = "sample_index.npy"
SHUFFLE = "shuffle_index.npy"
INT32 = 2**31 - 1
UINT32 = 2**32 - 2  # from so many samples on the shuffle index is int64
LAST_EPOCH = 0.80  # a last epoch of which less is needed is shuffled by itself


@dataclass(frozen=True)
class IndexRequest(Record):
    """What an index is built from.

    Args:
        prefix: path of the .bin/.idx pair, as Megatron is given it.
        first: first document of the split.
        last: the one after its last.
        split_name: which split.
        seq_length: tokens of a sample, without the extra one.
        seed: of numpy's RandomState.
        num_samples: how many are asked for, over as many epochs as that takes; None: one epoch.
        extra_token: whether a sample has one token more, its last label (Megatron's
            add_extra_token_to_sequence).
        drop_last: whether a last sample that is not full is left out; Megatron keeps it in the
            valid split only, where asked to.
        split: weights of the three splits where they share the dataset, "949,50,1"; None where each
            split has datasets of its own.

    Raises:
        ConfigError: a value is outside its range (exit 3), or the split has no document (exit 6).
    """

    prefix: Path
    first: int
    last: int
    split_name: SplitName
    seq_length: int
    seed: int
    num_samples: int | None = None
    extra_token: bool = True
    drop_last: bool = True
    split: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", Path(self.prefix))
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"seed {self.seed} is outside [0, 2^32), numpy's RandomState takes no other",
                hint="set training.seed to one that is inside",
            )
        if not 1 <= self.seq_length <= INT32:
            raise ConfigError(
                f"seq_length is {self.seq_length}, not in 1..2^31-1", hint="set model.seq_length"
            )
        if self.num_samples is not None and self.num_samples < 1:
            raise ConfigError(
                f"num_samples is {self.num_samples}, but at least 1 has to be asked for",
                hint="leave out a split that is not read",
            )
        if not self.drop_last and self.split_name != "valid":
            raise ConfigError(
                f"the {self.split_name} split drops its last partial sample: Megatron keeps it in"
                " the valid split only"
            )
        if not 0 <= self.first <= self.last:
            raise ConfigError(
                f"{self.prefix}: the documents {self.first}..{self.last} of the {self.split_name}"
                " split are not a range"
            )
        if self.first == self.last:
            raise ConfigError(
                f"{self.prefix}: the {self.split_name} split has no document: its width is zero at"
                f" {self.first}",
                exit=Exit.STAGE_FAILED,
                hint="give it more weight in datasets.NAME.split, or add data",
            )

    def identifiers(self, tokenizer: TokenizerIdentifiers) -> dict[str, object]:
        """What Megatron describes the index by, in its order."""
        return {
            "class": "GPTDataset",
            "dataset_path": str(self.prefix),
            "num_samples": self.num_samples,
            "index_split": self.split_name,
            "random_seed": self.seed,
            "sequence_length": self.seq_length,
            "split": self.split,
            "split_matrix": None if self.split is None else split_matrix(self.split),
            "tokenizer": tokenizer,
        }


@dataclass(frozen=True)
class IndexSizes:
    """The sizes of an index.

    Args:
        tokens: of one epoch.
        epochs: how often the documents are in the document index.
        separate_last: whether the last epoch's documents are shuffled by themselves.
        separate: samples shuffled together; the others by themselves.
        samples: of the index.
    """

    tokens: int
    epochs: int
    separate_last: bool
    separate: int
    samples: int


def cache_names(request: IndexRequest, tokenizer: TokenizerIdentifiers = None) -> CacheNames:
    """Names of the index's files in a data_cache_path of Megatron.

    Args:
        request: what it is built from.
        tokenizer: what Megatron's tokenizer gives as its `unique_identifiers`; it decides nothing
            but the names.
    """
    return CacheNames(
        describe_index(request.identifiers(tokenizer)), "GPTDataset", request.split_name
    )


def _samples_of(tokens: int, request: IndexRequest) -> int:
    """Samples that so many tokens give. A last one that is not full is counted in float32, as
    helpers.cpp does: wrong above 2^24 tokens, and kept."""
    usable = tokens - request.extra_token
    if request.drop_last:
        return usable // request.seq_length
    return int(np.ceil(np.int64(usable).astype(np.float32) / np.float32(request.seq_length)))


def count(request: IndexRequest, tokens: int) -> IndexSizes:
    """The sizes of the index of a split of `tokens` tokens
    (GPTDataset._build_document_sample_shuffle_indices).

    Raises ConfigError (exit 6): the split is shorter than one sample, or, where samples are
    asked for and its epochs are joined, empty.
    """
    extra = int(request.extra_token)
    length = request.seq_length
    asked = request.num_samples
    epochs = 1 if asked is None or tokens < 1 else max(1, -(-(asked * length + extra) // tokens))
    samples = _samples_of(epochs * tokens, request)
    if tokens < 1 or samples < 1:
        raise ConfigError(
            f"{request.prefix}: the {request.split_name} split has {tokens:,} tokens, fewer than"
            f" one sample of {length + extra:,}",
            exit=Exit.STAGE_FAILED,
            hint="add data, or lower model.seq_length",
        )
    if epochs == 1 or asked is None:
        return IndexSizes(tokens, epochs, False, samples, samples)
    before_last = ((epochs - 1) * tokens - extra) // length
    separate_last = asked - before_last < int(LAST_EPOCH * ((tokens - extra) // length))
    return IndexSizes(
        tokens, epochs, separate_last, before_last if separate_last else samples, samples
    )


def _position(dataset: IndexedDataset, sequence: int) -> int:
    """Token at which a sequence begins, from its offset in .idx."""
    if sequence == len(dataset):
        return dataset.num_tokens
    return int(dataset.offsets[sequence]) // dataset.dtype.itemsize


def _tokens(request: IndexRequest) -> int:
    """The tokens of the split, without reading all of .idx. Raises ConfigError (exit 6): see
    `IndexedDataset`, and `read_index_sizes`."""
    dataset = IndexedDataset(request.prefix)
    if len(dataset) > INT32:
        raise ConfigError(
            f"{request.prefix} has {len(dataset):,} sequences, but Megatron's document ids are"
            " int32",
            exit=Exit.STAGE_FAILED,
            hint='split the data into several datasets, or use sample_order = "native"',
        )
    if request.last > len(dataset):
        raise ConfigError(
            f"{request.prefix} has {len(dataset):,} sequences, the {request.split_name} split was"
            f" to end with number {request.last - 1:,}",
            exit=Exit.STAGE_FAILED,
            hint="the data changed: run the stage again",
        )
    return _position(dataset, request.last) - _position(dataset, request.first)


def read_index_sizes(request: IndexRequest) -> IndexSizes:
    """The sizes of an index that need not be built yet.

    Raises ConfigError (exit 6): the data cannot be read, is shorter than the split or than one
    sample, or has more than 2^31 - 1 sequences.
    """
    return count(request, _tokens(request))


def index_facts(request: IndexRequest) -> dict[str, object]:
    """What the index depends on, as JSON values: the request and the .idx as it is now. Raises
    ConfigError (exit 6): there is none."""
    path = idx_path(request.prefix)
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}",
            exit=Exit.STAGE_FAILED,
            hint="prepare the data first: invoke prep-data",
        ) from None
    return {
        "request": request.to_json(),
        "idx": {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns},
    }


def progress_counter(progress: ProgressCallback, total: int) -> Callable[[int], None]:
    """Counts elements up to `total`."""
    done = 0

    def tick(elements: int) -> None:
        nonlocal done
        done += elements
        progress(min(done, total), total)

    return tick


def no_progress(done: int, total: int) -> None:
    """Tells nobody."""


def build_index(
    request: IndexRequest,
    folder: Path,
    threads: int,
    tokenizer: TokenizerIdentifiers = None,
    progress: ProgressCallback = no_progress,
) -> IndexSizes:
    """Write the three arrays, their description and our mark into `folder`; what was there under
    these names is replaced.

    Memory: 8 bytes an entry of the document index, then 4 a sample (8 above 2^32 - 3 samples),
    and a few MB.

    Args:
        request: what to build.
        folder: made if it is missing.
        threads: for the sample index; the shuffles are one stream of numbers.
        tokenizer: see `cache_names`.
        progress: called now and then.

    Raises:
        ConfigError (exit 6): see `read_index_sizes`; .idx is damaged; the last sample would end
            before the last document.
        OSError: as reading and writing does.
    """
    facts = index_facts(request)
    tokens = _tokens(request)
    counts = count(request, tokens)
    names = cache_names(request, tokenizer)
    entries = counts.epochs * (request.last - request.first)
    tick = progress_counter(progress, 2 * entries + 2 * counts.samples)
    generator = _index.MersenneTwister(request.seed)
    with write_index_files(
        folder, names, (DOCUMENTS, SAMPLES, SHUFFLE), SCHEMA, {**facts, **asdict(counts)}
    ):
        _write_documents_and_samples(request, counts, generator, names, folder, threads, tick)
        _write_shuffle(counts, generator, names.path(folder, SHUFFLE), tick)
    progress(1, 1)
    return counts


def _write_documents_and_samples(
    request: IndexRequest,
    counts: IndexSizes,
    generator: _index.MersenneTwister,
    names: CacheNames,
    folder: Path,
    threads: int,
    tick: Callable[[int], None],
) -> None:
    """The document index is in memory only here: the shuffle index takes as much after it."""
    documents = request.last - request.first
    entries = documents * counts.epochs
    index = _documents(request, counts, tick)
    together = entries
    if counts.separate_last:
        together -= documents
    index.shuffle(generator, 0, together, tick)
    index.shuffle(generator, together, entries, tick)
    _check_last(request, counts, index)
    with npy_file(names.path(folder, DOCUMENTS), (entries,), np.int32) as (file, at):
        index.write_ids(file, at, threads)
    wide = entries > INT32
    dtype = np.int64 if wide else np.int32
    extra = int(request.extra_token)
    with npy_file(names.path(folder, SAMPLES), (counts.samples + 1, 2), dtype) as (file, at):
        index.write_samples(file, at, request.seq_length, extra, counts.samples, wide, threads)


def _write_shuffle(
    counts: IndexSizes,
    generator: _index.MersenneTwister,
    path: Path,
    tick: Callable[[int], None],
) -> None:
    wide = counts.samples >= UINT32
    dtype = np.int64 if wide else np.uint32
    with npy_file(path, (counts.samples,), dtype) as (file, at):
        _index.write_shuffle_index(generator, counts.separate, counts.samples, wide, file, at, tick)


def _documents(
    request: IndexRequest, counts: IndexSizes, tick: Callable[[int], None]
) -> _index.MegatronDocuments:
    path = idx_path(request.prefix)
    with open(path, "rb") as file:
        try:
            index = _index.MegatronDocuments(
                file.fileno(), HEADER.size, request.first, request.last, counts.epochs, tick
            )
        except RuntimeError as error:
            raise data_error(path, str(error)) from None
        except MemoryError:
            needed = 8 * counts.epochs * (request.last - request.first) / 2**30
            raise ConfigError(
                f"{request.prefix}: {counts.epochs:,} epochs of its documents take {needed:,.0f}"
                " GiB of memory, which this machine does not give",
                exit=Exit.STAGE_FAILED,
                hint='use sample_order = "native", which needs no index',
            ) from None
    if index.tokens != counts.epochs * counts.tokens:
        raise data_error(
            path,
            f"lengths sum to {index.tokens // counts.epochs:,} tokens, offsets say"
            f" {counts.tokens:,}",
        )
    return index


def _check_last(request: IndexRequest, counts: IndexSizes, index: _index.MegatronDocuments) -> None:
    """Refuse the row Megatron fails on: a last sample that is not full, behind a last document
    without a token, would begin at offset -1."""
    ends = counts.samples * request.seq_length + request.extra_token
    if ends > index.tokens and index.last_length < request.extra_token:
        raise ConfigError(
            f"{request.prefix}: seed {request.seed} puts a document of no tokens last, and Megatron"
            " cannot keep a partial last sample before it",
            exit=Exit.STAGE_FAILED,
            hint=(
                "drop the last partial sample, choose another seed, or write the data without empty"
                " sequences"
            ),
        )


class MegatronIndex:
    """The three arrays of an index, mapped.

    Args:
        folder: where `build_index` put them.
        request: what it was built from.
        tokenizer: as it was then.

    Attributes:
        documents: document ids, int32 [entries]. samples: position in `documents` and token
        offset of each sample's begin, int32 or int64 [num_samples + 1, 2]. shuffle: the sample
        at each position of training, uint32 or int64 [num_samples]. num_samples: of the index,
        at least as many as were asked for.

    Raises:
        ConfigError (exit 6): it is not built, it was built from something else, or a file is
        damaged.
    """

    def __init__(
        self, folder: Path, request: IndexRequest, tokenizer: TokenizerIdentifiers = None
    ) -> None:
        names = cache_names(request, tokenizer)
        counts = read_index_sizes(request)
        check_index_mark(
            folder,
            names,
            SCHEMA,
            {**index_facts(request), **asdict(counts)},
            f"{request.prefix} ({request.split_name})",
        )
        self.request = request
        self.num_samples = counts.samples
        entries = counts.epochs * (request.last - request.first)
        self.documents: NDArray[np.int32] = map_array(
            names.path(folder, DOCUMENTS), (entries,), np.int32
        )
        rows = (self.num_samples + 1, 2)
        self.samples: Numbers = map_array(
            names.path(folder, SAMPLES), rows, np.int64 if entries > INT32 else np.int32
        )
        numbers = (self.num_samples,)
        self.shuffle: Numbers = map_array(
            names.path(folder, SHUFFLE),
            numbers,
            np.int64 if self.num_samples >= UINT32 else np.uint32,
        )
