"""The newest state in memory: what a checkpoint holds, copied every few steps into a file in the
host's memory, which outlives the ranks. Ranks that begin again go on from it.

A rank's file has two slots, written by turns: a kill in the middle of a copy leaves the other one
whole. Of a slot the data are written first, then its description and the hash of both, and last
the word that says of which step it is: where that word stands, all else does. Nothing that is read
is executed: JSON and the bytes of tensors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.manifest import ALIGNMENT, DTYPE_BYTES
from trainkit.train.checkpoint.dcp_storage import DTYPE_NAMES, DTYPES
from trainkit.train.checkpoint.save_load import CheckpointMetadata, layout_entry
from trainkit.train.checkpoint.staging import copy_all, parts_of
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.shards import Offsets

FOLDER_VARIABLE = "TRAINKIT_MEMORY_FOLDER"  # the agent's, on each of its ranks
FORM = b"tkmem/1\0"
# form; the step + 1, 0 where nothing may be believed; bytes of the description; xxh3_128 of it and
# of the data
HEAD = struct.Struct("<8sQQ16s")
STEP = struct.Struct("<Q")
STEP_AT = 8
ROOM = 16384  # bytes of a description for what changes from copy to copy
HASHED_AT_ONCE = 2**24  # bytes; between two such pieces other threads may run
PAGE = 4096


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


class MemorySlot:
    """One copy's place in a rank's file.

    Args:
        memory: the file's.
        start: where the slot begins, at a page.
        of: whose state it is, as JSON text: a description of another one is not believed.
        table, size: as `table_of` has them.
    """

    def __init__(
        self, memory: mmap.mmap, start: int, of: str, table: list[SavedPart], size: int
    ) -> None:
        self._memory = memory
        self._start = start
        self._of = of
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

    def forget(self) -> None:
        """From now on it holds nothing."""
        STEP.pack_into(self._memory, self._start + STEP_AT, 0)

    def seal(self, copy: Mapping[str, object]) -> None:
        """Say of the data that are there what they are.

        Args:
            copy: its "step", and what else belongs to it.
        """
        text = f'{{"of":{self._of},"copy":{json.dumps(copy)}}}'.encode()
        assert len(text) <= self._room, f"{len(text)} bytes in a room of {self._room}"
        at = self._start + HEAD.size
        self._memory[at : at + len(text)] = text
        head = HEAD.pack(FORM, 0, len(text), self._digest(len(text)))
        self._memory[self._start : self._start + HEAD.size] = head
        STEP.pack_into(self._memory, self._start + STEP_AT, int(str(copy["step"])) + 1)

    def read(self) -> dict[str, object] | None:
        """What it says it holds, not yet compared with the hash; None where that is nothing, or
        another rank's, run's or layout's."""
        form, word, length, _ = HEAD.unpack_from(self._memory, self._start)
        if form != FORM or not word or length > self._room:
            return None
        at = self._start + HEAD.size
        try:
            found = json.loads(self._memory[at : at + length])
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("of") != json.loads(self._of):
            return None
        copy = found.get("copy")
        if isinstance(copy, dict) and copy.get("step") == word - 1 and "timeline" in copy:
            return copy
        return None

    def is_whole(self) -> bool:
        """Whether the hash is that of what is there."""
        _, _, length, digest = HEAD.unpack_from(self._memory, self._start)
        return length <= self._room and bool(digest == self._digest(length))

    def _digest(self, length: int) -> bytes:
        digest = xxhash.xxh3_128()
        at = self._start + HEAD.size
        with memoryview(self._memory) as memory:
            digest.update(memory[at : at + length])
            for begin in range(self._data, self._data + self._size, HASHED_AT_ONCE):
                end = min(begin + HASHED_AT_ONCE, self._data + self._size)
                digest.update(memory[begin:end])
        return digest.digest()


class MemoryCopies:
    """Copies of one rank's state. All ranks call everything together, in the same order.

    Args:
        job: with checkpoint.memory_interval.
        run: its folder.
        world: this rank among the others.
        tensors: what this rank holds, by name: always the same ones.

    Raises:
        TrainkitError: exit 3, with the sizes, where the host's memory has no room for the copies.
    """

    def __init__(
        self, job: Job, run: RunFolder, world: World, tensors: Mapping[str, Tensor]
    ) -> None:
        if not (folder := os.environ.get(FOLDER_VARIABLE)):
            raise ConfigError(
                f"checkpoint.memory_interval: {FOLDER_VARIABLE} names no folder for the copies",
                hint="the launcher's agents set it; without them leave out memory_interval",
            )
        self._world = world
        self._node_ranks = job.ranks_per_node
        self._timeline_file = _timeline_file(run.path)
        self._timeline = ""
        self._tensors = tensors
        table, size = table_of(tensors)
        of = json.dumps(
            {
                "run": run.id,
                "rank": world.rank,
                "layout": layout_entry(job, world.size),
                "tensors": [list(asdict(part).values()) for part in table],
            }
        )
        length = MemorySlot.size_of(of, size)
        self._memory = self._map(Path(folder), 2 * length)
        self._slots = [MemorySlot(self._memory, start, of, table, size) for start in (0, length)]
        self._next = 0  # the slot of the next copy
        self._common: list[int] = []
        self._cuda = any(part.is_cuda for t in tensors.values() for part in parts_of(t).values())
        if self._cuda:
            self._lock_pages()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._copied: Future[None] | None = None
        self._sealed: Future[None] | None = None

    @classmethod
    def of(
        cls, job: Job, run: RunFolder, world: World, tensors: Mapping[str, Tensor]
    ) -> MemoryCopies | None:
        """Those of a job; None where it wants none. As the class says."""
        return cls(job, run, world, tensors) if job.checkpoint.memory_interval else None

    @property
    def copying(self) -> bool:
        """Whether `wait_for_copying` would wait."""
        return self._copied is not None and not self._copied.done()

    def wait_for_copying(self) -> None:
        """Wait until the tensors may change; on CUDA that is at once."""
        if self._copied is not None:
            self._copied.result()

    def copy(self, metadata: CheckpointMetadata) -> None:
        """Begin to copy the state of this step behind training: the tensors must not change before
        `wait_for_copying` has returned."""
        slot = self._slots[self._next]
        self._next = 1 - self._next
        moves = [
            (slot.rooms[name, at], part)
            for name, tensor in self._tensors.items()
            for at, part in parts_of(tensor).items()
            if part.numel()
        ]
        description = asdict(metadata) | {"timeline": self._timeline}
        arrived = None
        if self._cuda:
            self.wait_until_sealed()  # until then the other slot is no copy
            _overwrite(slot, moves)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        else:
            self._copied = self._thread.submit(_overwrite, slot, moves)
        self._sealed = self._thread.submit(_seal, slot, description, arrived)

    def find(self, published: int) -> int:
        """Look which steps all ranks have, in memory of the run as it went on last; `load` takes
        one of them.

        Args:
            published: the step of the newest checkpoint, by rank 0.

        Returns rank 0's `published`.
        """
        timeline = ""
        if self._world.rank == 0:
            with contextlib.suppress(OSError):
                timeline = self._timeline_file.read_text()
        mine = {
            (int(str(copy["step"])), str(copy["timeline"]))
            for slot in self._slots
            if (copy := slot.read())
        }
        said: list[tuple[set[tuple[int, str]], int, str]] = [(set(), 0, "")] * self._world.size
        dist.all_gather_object(said, (mine, published, timeline))
        _, published, self._timeline = said[0]
        held = set.intersection(*(steps for steps, _, _ in said))
        found = {step for step, timeline in held if timeline and timeline == self._timeline}
        self._common = sorted(found, reverse=True)
        return published

    @torch.no_grad()
    def load(self, least: int) -> CheckpointMetadata | None:
        """Read the newest copy that all ranks have whole into the tensors.

        Args:
            least: of this step or a later one.

        Returns what was saved with it; None where there is none.
        """
        for step in self._common:
            if step < least:
                break
            slot = next(slot for slot in self._slots if self._holds(slot, step))
            whole = torch.tensor(int(slot.is_whole()))
            if not whole:
                _warn(f"rank {self._world.rank}: the copy of step {step} in memory is damaged")
            dist.all_reduce(whole, dist.ReduceOp.MIN)
            if whole:
                for name, tensor in self._tensors.items():
                    for at, part in parts_of(tensor).items():
                        if part.numel():
                            part.copy_(slot.rooms[name, at])
                self._keep(slot)
                copy = {k: v for k, v in (slot.read() or {}).items() if k != "timeline"}
                return CheckpointMetadata(**copy)  # type: ignore[arg-type]
        return None

    def _holds(self, slot: MemorySlot, step: int) -> bool:
        copy = slot.read()
        return copy is not None and (copy["step"], copy["timeline"]) == (step, self._timeline)

    def begin_timeline(self) -> None:
        """Training goes on from elsewhere than from a copy. What is in memory now, here and on
        hosts that do not take part, is never believed again: a later look could mix it with copies
        of the same steps made another time, which on GPUs need not be equal."""
        self._keep(None)
        said = [secrets.token_hex(8)]
        dist.broadcast_object_list(said, src=0)
        self._timeline = said[0]
        if self._world.rank == 0:
            try:
                self._timeline_file.parent.mkdir(exist_ok=True)
                write_text(self._timeline_file, self._timeline)
            except OSError as error:
                _warn(f"{self._timeline_file}: {error}; copies in memory are of no use")

    def close(self) -> None:
        """Wait for the copy under way, whatever comes of it: the run has ended, perhaps with
        something worse."""
        if self._sealed is not None:
            wait([self._sealed])

    def wait_until_sealed(self) -> None:
        """Wait until the last copy is one that `load` takes."""
        if self._sealed is not None:
            self._sealed.result()

    def _keep(self, kept: MemorySlot | None) -> None:
        self.wait_until_sealed()
        for number, slot in enumerate(self._slots):
            if slot is kept:
                self._next = 1 - number
            else:
                slot.forget()

    def _map(self, folder: Path, size: int) -> mmap.mmap:
        """This rank's file. All of it is there before the first byte is written: what a full tmpfs
        cannot take would end the process with SIGBUS later."""
        path = folder / f"{self._world.rank}.state"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, 0)  # it is of another layout
            os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            disk = os.statvfs(folder)
            raise TrainkitError(
                f"checkpoint.memory_interval: rank {self._world.rank} needs {size / 1e9:.3f} GB in"
                f" {folder} for two copies of its state, the {self._node_ranks} ranks of its node"
                f" {self._node_ranks * size / 1e9:.3f} GB, and there are"
                f" {disk.f_bavail * disk.f_frsize / 1e9:.3f} GB free: {error.strerror}",
                exit=Exit.CONFIG,
                hint="give the node a larger tmpfs (clusters.X.node_folder), or leave it out",
            ) from None
        finally:
            os.close(handle)

    def _lock_pages(self) -> None:
        """So that copies from the device do not keep the host waiting."""
        with memoryview(self._memory) as memory:
            address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, len(self._memory), 0)))


def _pages(size: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-size // PAGE) * PAGE


def _overwrite(slot: MemorySlot, moves: list[tuple[Tensor, Tensor]]) -> None:
    slot.forget()
    copy_all(moves)


def _seal(slot: MemorySlot, copy: Mapping[str, object], arrived: torch.cuda.Event | None) -> None:
    """In a thread of its own: without the device of the copies as its current one it would make a
    context on GPU 0."""
    if arrived is not None:
        with torch.cuda.device(arrived.device):
            arrived.synchronize()
    slot.seal(copy)


def _warn(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr, flush=True)


def _timeline_file(run: Path) -> Path:
    """Says which copies of a run belong together."""
    return run / "launch" / "timeline"


def end_timeline(run: Path) -> None:
    """Of a run whose ranks keep no copies now: those that are there are never believed again.

    Args:
        run: its folder.
    """
    with contextlib.suppress(OSError):
        _timeline_file(run).unlink(missing_ok=True)
