"""The tokens of samples, a whole batch at a time.

Shapes: n samples that are read, B rows of a batch, S = seq_length. A row holds S + 1 tokens: one
more, which is the last label.
"""

from __future__ import annotations

import contextlib
import errno
import mmap as mmap_module
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.format import CODES, data_error
from trainkit.data.order.native import SPLITS, SplitName, parse_split, split_bounds

Numbers = NDArray[np.int64]
NO_TOKEN = -1  # in a row: the sample has no token there
# samples after which mapped index arrays are let go: a sample touches a page of each, so at most 4
# x 256 MB are resident
DROP_EVERY = 2**16


class IdRange(NamedTuple):
    """What was read: the lowest and the highest id (0 and -1: nothing), and how many places of
    the rows hold NO_TOKEN."""

    lowest: int
    highest: int
    missing: int


class Samples(Protocol):
    """One split of one dataset. May be used by several threads."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch; of an index, all it has."""

    def read(self, numbers: Numbers, rows: Numbers, out: Numbers) -> IdRange:
        """out[rows[i]] = the tokens of sample numbers[i]; int64 [n], [n] and [B, S + 1].

        Raises:
            IndexError: a number outside [0, num_samples).
            ValueError: a row outside [0, B), or an array of another shape or dtype.
            ConfigError (exit 6): the file cannot be read, or does not hold what its index says.
        """

    def ahead(self, numbers: Numbers) -> None:
        """These are read soon: a hint for the file system, which may do nothing."""


def _check_width(out: Numbers, seq_length: int) -> None:
    if out.ndim != 2 or out.shape[1] != seq_length + 1:
        raise ValueError(f"out has the shape {out.shape}, not (B, {seq_length + 1})")


def _open(dataset: IndexedDataset, mmap: bool) -> _index.Reader:
    """A dataset's .bin as the extension reads it."""
    try:
        reader = _index.Reader(str(dataset.bin), CODES[dataset.dtype], mmap)
    except OSError as error:
        raise _unreadable(error) from None
    if reader.num_tokens < dataset.num_tokens:
        raise data_error(
            dataset.bin,
            f"has {reader.num_tokens:,} tokens now, and had {dataset.num_tokens:,}",
            "it was written again meanwhile: start again",
        )
    return reader


def _unreadable(error: OSError) -> ConfigError:
    if error.errno == errno.EMFILE:
        hint = "raise the limit of open files: ulimit -n"
    else:
        hint = "is it being written, or is its file system gone?"
    return ConfigError(str(error.strerror), exit=Exit.STAGE_FAILED, hint=hint)


@contextlib.contextmanager
def _named(dataset: IndexedDataset) -> Iterator[None]:
    """Failures of reading by an index, as ConfigError."""
    try:
        yield
    except OSError as error:
        raise _unreadable(error) from None
    except ValueError as error:
        if "sample index" not in str(error):
            raise  # an argument is wrong, not the index
        raise data_error(
            dataset.bin,
            f"{error}",
            "the index is damaged or was made for other data: invoke prep-data --force --job JOB",
        ) from None


class NativeSamples:
    """Fixed windows of a dataset's token stream: window k holds tokens k * S .. k * S + S, so
    neighbours share one.

    Args:
        dataset: the tokens; of its .idx nothing but the header is read.
        split: weights as `parse_split` takes them.
        name: which split.
        seq_length: S.
        mmap: map .bin; False: read it by pread. (Where a file is cut short during a read, a map
            ends the process with SIGBUS.)

    Raises:
        ConfigError: the split is malformed (exit 3), the data is shorter than one sample or
        cannot be read (exit 6). ConfigError (exit 3): on `read`, if the split has no window.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        split: str,
        name: SplitName,
        seq_length: int,
        mmap: bool = True,
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.name = name
        self.seq_length = seq_length
        parts = parse_split(split)
        if dataset.num_tokens < seq_length + 1:
            raise ConfigError(
                f"{dataset.prefix} has {dataset.num_tokens:,} tokens, fewer than one sample of"
                f" seq_length + 1 = {seq_length + 1:,}",
                exit=Exit.STAGE_FAILED,
                hint="add data, or lower model.seq_length",
            )
        low, high = split_bounds(parts, (dataset.num_tokens - 1) // seq_length)[SPLITS.index(name)]
        self.first_window = low
        self.num_samples = high - low
        self._reader = _open(dataset, mmap)

    def read(self, numbers: Numbers, rows: Numbers, out: Numbers) -> IdRange:
        if self.num_samples == 0 and len(numbers):
            raise ConfigError(
                f"{self.dataset.prefix} has no {self.name} sample: split {self.split!r} leaves it"
                f" no window of {self.seq_length} tokens",
                hint=(
                    "give the split a larger weight, add data, or set training.eval_iters = 0 if it"
                    " is only evaluated"
                ),
            )
        _check_width(out, self.seq_length)
        try:
            return IdRange(
                *self._reader.windows(self.first_window, self.num_samples, numbers, rows, out)
            )
        except OSError as error:
            raise _unreadable(error) from None

    def ahead(self, numbers: Numbers) -> None:
        self._reader.ahead(self.first_window, self.num_samples, numbers, self.seq_length + 1)


class MegatronSamples:
    """The samples of Megatron's GPTDataset, by its document and sample index (facts of the
    format: trainkit/data/order/megatron.py).

    Sample k goes from place sample_index[k] to place sample_index[k + 1]; a place (p, o) is
    token o of sequence document_index[p]. With `extra_token` the token at the second place
    belongs to it, too; without, the last label is missing. Where tokens are missing, also of a
    last sample that was kept though it is short, a row holds NO_TOKEN.

    Args:
        dataset: the tokens.
        document_index: int32 [P], sequences in the order they are read.
        sample_index: int32 or int64 [n + 1, 2].
        seq_length: S.
        extra_token: add_extra_token_to_sequence.
        mmap: map .bin; False: read it by pread.

    Raises:
        ConfigError (exit 6): .bin cannot be read; on `read`, the index does not fit it.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        document_index: NDArray[np.int32],
        sample_index: NDArray[Any],
        seq_length: int,
        *,
        extra_token: bool = True,
        mmap: bool = True,
    ) -> None:
        self.dataset = dataset
        self.seq_length = seq_length
        self.extra = int(extra_token)
        self.num_samples = max(0, len(sample_index) - 1)
        self._arrays = (document_index, sample_index, dataset.lengths, dataset.offsets)
        self._maps = [held for array in self._arrays if (held := _mapped(array)) is not None]
        self._reader = _open(dataset, mmap)
        self._since_drop = 0

    def read(self, numbers: Numbers, rows: Numbers, out: Numbers) -> IdRange:
        _check_width(out, self.seq_length)
        with _named(self.dataset):
            ids = self._reader.documents(*self._arrays, numbers, rows, out, self.extra)
        self._drop(len(numbers))
        return IdRange(*ids)

    def ahead(self, numbers: Numbers) -> None:
        with _named(self.dataset):
            self._reader.ahead_of_documents(*self._arrays, numbers, self.seq_length + 1, self.extra)

    def _drop(self, count: int) -> None:
        """Let go of the index arrays' resident pages now and then: over an epoch every page of
        them is touched. The page cache keeps them."""
        self._since_drop += count
        if self._since_drop >= DROP_EVERY:
            self._since_drop = 0
            for held in self._maps:
                held.madvise(mmap_module.MADV_DONTNEED)


def _mapped(array: NDArray[Any]) -> mmap_module.mmap | None:
    """The file's map that an array is a view of. None for other memory, and for memory that can
    be written, which would be lost."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap_module.mmap) and not array.flags.writeable:
        return base
    return None


class MockSamples:
    """Random tokens for trying a cluster without data: token i of a sample is raw output i of
    Philox4x64 keyed by (seed, number), modulo vocab_size."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, num_samples: int) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.num_samples = num_samples

    def read(self, numbers: Numbers, rows: Numbers, out: Numbers) -> IdRange:
        _check_width(out, self.seq_length)
        self.ahead(numbers)
        # numpy's Philox has one key: a sample at a time
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            raw = np.random.Philox(key=np.array([self.seed, number], np.uint64)).random_raw(
                self.seq_length + 1
            )
            out[row] = raw % np.uint64(self.vocab_size)
        if len(numbers):
            return IdRange(0, self.vocab_size - 1, 0)
        return IdRange(0, -1, 0)

    def ahead(self, numbers: Numbers) -> None:
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_samples:
            raise IndexError(
                f"sample {numbers.min() if numbers.min() < 0 else numbers.max()} of"
                f" {self.num_samples}"
            )
