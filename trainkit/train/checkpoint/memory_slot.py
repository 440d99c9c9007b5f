"""One copy of a rank's state in a file in the host's memory.

The data are written first, then their description and the hash of both, and last the word that says
of which step it is: where that word stands, all else does. Nothing that is read is executed: JSON
and the bytes of tensors.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.manifest import ALIGNMENT, DTYPE_BYTES
from trainkit.train.checkpoint.dcp_storage import DTYPE_NAMES, DTYPES
from trainkit.train.checkpoint.staging import parts_of
from trainkit.train.parallel.shards import Offsets

FORM = b"tkmem/1\0"
# form; the step + 1, 0 where nothing may be believed; bytes of the description; xxh3_128 of it and
# of the data
HEAD = struct.Struct("<8sQQ16s")
STEP = struct.Struct("<Q")
STEP_AT = 8
ROOM = 16384  # bytes of a description for what changes from copy to copy
PIECE = 2**24  # bytes; between two such pieces other threads may run
PAGE = 4096
Copy = tuple[int, str]  # its step and its timeline


@dataclass(frozen=True)
class SavedPart:
    """A box of a tensor that this rank holds, and where its bytes begin in a slot's data."""

    name: str
    offsets: Offsets
    shape: tuple[int, ...]
    dtype: str
    start: int


def table_of(tensors: Mapping[str, Tensor]) -> tuple[list[SavedPart], int]:
    """(Where everything goes in a slot's data, its bytes.)"""
    table: list[SavedPart] = []
    end = 0
    for name, tensor in tensors.items():
        for at, part in parts_of(tensor).items():
            if part.numel():
                dtype = DTYPE_NAMES[part.dtype]
                table.append(SavedPart(name, at, tuple(part.shape), dtype, end))
                size = part.numel() * DTYPE_BYTES[dtype]
                end += -(-size // ALIGNMENT) * ALIGNMENT
    return table, end


@dataclass(frozen=True)
class Description:
    """What a slot says it holds.

    Args:
        state: whose, as `short_name` says it.
        which: of that state's copies.
        saved: a table of what belongs to it.
    """

    state: str
    which: Copy
    saved: Any


def short_name(of: str) -> str:
    """Of what says whose a state is."""
    return xxhash.xxh3_128_hexdigest(of.encode())


class Slot:
    """A copy's place in a file, whosever it is.

    Args:
        memory: the file's.
        start, length: in bytes, whole pages.
    """

    def __init__(self, memory: mmap.mmap, start: int, length: int) -> None:
        self.memory = memory
        self.start = start
        self.length = length
        # uint8, all of it
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=start)

    def pieces(self, start: int = 0) -> list[Tensor]:
        """All of it from this byte on, as it goes over a line."""
        return list(torch.split(self.bytes[start:], PIECE))

    def forget(self) -> None:
        """From now on it holds nothing."""
        STEP.pack_into(self.memory, self.start + STEP_AT, 0)

    def describe(self) -> Description | None:
        """What it says it holds, not yet compared with the hash; None where that is nothing."""
        form, word, length, _ = HEAD.unpack_from(self.memory, self.start)
        if form != FORM or not word or length > self.length - HEAD.size:
            return None
        at = self.start + HEAD.size
        try:
            found = json.loads(self.memory[at : at + length])
            copy = found["copy"]
            if copy["step"] == word - 1 and isinstance(copy["timeline"], str):
                which = (copy["step"], copy.pop("timeline"))
                return Description(short_name(json.dumps(found["of"])), which, copy)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            pass
        return None


class MemorySlot(Slot):
    """The place of a copy of this rank's own.

    Args:
        memory: the file's.
        start: where the slot begins, at a page.
        of: whose state it is, as JSON text: a description of another one is not believed.
        table, size: as `table_of` has them.
    """

    def __init__(
        self, memory: mmap.mmap, start: int, of: str, table: list[SavedPart], size: int
    ) -> None:
        super().__init__(memory, start, self.size_of(of, size))
        self._of = of
        self.state = short_name(of)
        self._room = len(of) + ROOM
        self._data = start + _pages(HEAD.size + self._room)
        self._size = size
        self.rooms: dict[tuple[str, Offsets], Tensor] = {}  # tensors over its data
        for part in table:
            at = self._data + part.start
            count = prod(part.shape)
            flat = torch.frombuffer(memory, dtype=DTYPES[part.dtype], count=count, offset=at)
            self.rooms[part.name, part.offsets] = flat.view(part.shape)

    @staticmethod
    def size_of(of: str, size: int) -> int:
        """What one takes; arguments as above."""
        return _pages(HEAD.size + len(of) + ROOM) + _pages(size)

    def seal(self, copy: Mapping[str, object]) -> None:
        """Say of the data that are there what they are.

        Args:
            copy: its "step", and what else belongs to it.
        """
        text = f'{{"of":{self._of},"copy":{json.dumps(copy)}}}'.encode()
        assert len(text) <= self._room, f"{len(text)} bytes in a room of {self._room}"
        at = self.start + HEAD.size
        self.memory[at : at + len(text)] = text
        head = HEAD.pack(FORM, 0, len(text), self._digest(len(text)))
        self.memory[self.start : self.start + HEAD.size] = head
        STEP.pack_into(self.memory, self.start + STEP_AT, int(str(copy["step"])) + 1)

    def describe(self) -> Description | None:
        """As Slot's; None too where it is another rank's, run's or layout's."""
        found = super().describe()
        return found if found and found.state == self.state else None

    def is_whole(self) -> bool:
        """Whether the hash is that of what is there."""
        _, _, length, digest = HEAD.unpack_from(self.memory, self.start)
        return length <= self._room and bool(digest == self._digest(length))

    def _digest(self, length: int) -> bytes:
        digest = xxhash.xxh3_128()
        at = self.start + HEAD.size
        with memoryview(self.memory) as memory:
            digest.update(memory[at : at + length])
            for begin in range(self._data, self._data + self._size, PIECE):
                end = min(begin + PIECE, self._data + self._size)
                digest.update(memory[begin:end])
        return digest.digest()


def map_slots(path: Path, size: int) -> mmap.mmap:
    """The file at `path`. All of its `size` bytes are there before the first is written: what a
    full tmpfs cannot take would end the process with SIGBUS later. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(handle).st_size != size:
            os.ftruncate(handle, 0)  # it is of another layout
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(handle)


def _pages(size: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-size // PAGE) * PAGE
