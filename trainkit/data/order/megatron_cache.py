"""What Megatron calls the files of its sample order, and how they are written: a folder of them
serves as its data_cache_path.

Megatron-core 0.16 (core/datasets/megatron_dataset.py, gpt_dataset.py, blended_dataset.py)
describes an index by a JSON text whose MD5 begins the names of its files. The text does not hold
everything the index depends on (the .idx itself, the extra token, drop-last), so beside
Megatron's files stands one of ours, MARK, which does: `check_index_mark` refuses what was built
from something else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import atomic_open, remove_leftovers, write_json, write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.order.native import parse_split

DESCRIPTION = "description.txt"
MARK = "trainkit.json"
TokenizerIdentifiers = (
    Mapping[str, Any] | None
)  # `unique_identifiers` of Megatron's tokenizer, as JSON values
Bounds = tuple[float, float]


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """weights / sum in float64, in numpy's order of summation (core/datasets/utils.py). Not
    idempotent: Megatron does it twice, so must we."""
    values = np.array(weights, dtype=np.float64)
    shares: list[float] = (values / np.sum(values)).tolist()
    return shares


def split_matrix(split: str) -> list[Bounds | None]:
    """Where train, valid and test begin and end as parts of the whole; None where a weight is 0
    (core/datasets/blended_megatron_dataset_config.py).

    Raises ConfigError: see `parse_split`.
    """
    parse_split(split)
    weights = [float(part) for part in re.findall(r"[.0-9]+", split)]
    ends = list(accumulate(normalize_weights(weights + [0.0] * (3 - len(weights))), initial=0))
    return [(low, high) if high > low else None for low, high in pairwise(ends)]


def split_ranges(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """First sequence and the one after the last of train, valid and test: the bounds times
    `sequences`, rounded half to even. None as `split_matrix`."""
    scaled = [
        bounds and tuple(round(bound * float(sequences)) for bound in bounds)
        for bounds in split_matrix(split)
    ]
    return [(bounds[0], bounds[1]) if bounds else None for bounds in scaled]


@dataclass(frozen=True)
class CacheNames:
    """The files of one index.

    Args:
        description: the text Megatron hashes and writes.
        kind: "GPTDataset" or "BlendedDataset".
        split: "train", "valid" or "test".
    """

    description: str
    kind: str
    split: str

    @property
    def base(self) -> str:
        """What every name begins with."""
        digest = hashlib.md5(self.description.encode("utf-8"), usedforsecurity=False).hexdigest()
        return f"{digest}-{self.kind}-{self.split}"

    def path(self, folder: Path, part: str) -> Path:
        """The file of `part`: DESCRIPTION, MARK, or an array's name and .npy."""
        return Path(folder) / f"{self.base}-{part}"


def describe_index(identifiers: Mapping[str, Any]) -> str:
    """The text of an index's identifiers, spelled and ordered as Megatron does."""
    return json.dumps(identifiers, indent=4)


@contextlib.contextmanager
def npy_file(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[tuple[int, int]]:
    """An .npy file that appears whole or not at all: (file descriptor, byte at which the array
    begins), to be filled by pwrite.

    Raises OSError as the write does.
    """
    with atomic_open(path) as file:
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        file.flush()
        yield file.fileno(), file.tell()


@contextlib.contextmanager
def write_index_files(
    folder: Path, names: CacheNames, arrays: Sequence[str], schema: str, facts: Mapping[str, Any]
) -> Iterator[None]:
    """Inside the block the arrays are written; the description and the mark vanish before it and
    are there again only after all of them."""
    for part in (MARK, DESCRIPTION):
        names.path(folder, part).unlink(missing_ok=True)
    for part in (MARK, DESCRIPTION, *arrays):
        remove_leftovers(names.path(folder, part))
    yield
    write_text(names.path(folder, DESCRIPTION), names.description)
    write_json(names.path(folder, MARK), document(schema, **facts))


def check_index_mark(
    folder: Path, names: CacheNames, schema: str, facts: Mapping[str, Any], what: str
) -> None:
    """Check that what lies there was built from `facts`.

    Raises ConfigError (exit 6): nothing is there, or it was built from something else (named).
    """
    path = names.path(folder, MARK)
    hint = "build the index stage: invoke prep-data"
    if not path.is_file():
        raise ConfigError(
            f"the sample order of {what} is not built: there is no {path}",
            exit=Exit.STAGE_FAILED,
            hint=hint,
        )
    found = read_document(path, schema)
    for key, value in json.loads(json.dumps(facts)).items():
        if found.get(key) != value:
            raise ConfigError(
                f"{path} was built with {key} = {found.get(key)!r}, not {value!r}",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            )


def map_array(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """An .npy file, mapped read-only.

    Raises:
        ConfigError (exit 6): it is missing, damaged, or not of this shape and dtype.
        TrainkitError (exit 6): too many files are open, which says nothing of this one.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise TrainkitError(
                f"{path}: {error.strerror}",
                exit=Exit.STAGE_FAILED,
                hint="raise the limit of open files: ulimit -n",
            ) from None
        raise ConfigError(
            f"{path}: {error}",
            exit=Exit.STAGE_FAILED,
            hint="delete it and build the index stage again: invoke prep-data",
        ) from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise ConfigError(
            f"{path} holds {array.dtype.name} {list(array.shape)}, not {np.dtype(dtype).name}"
            f" {list(shape)}",
            exit=Exit.STAGE_FAILED,
            hint="delete it and build the index stage again: invoke prep-data",
        )
    return np.asarray(array)
