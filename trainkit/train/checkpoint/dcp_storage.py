"""The tensors of a checkpoint on disk: a storage of our own for torch.distributed.checkpoint (DCP).

DCP plans who writes and who reads which part of which tensor; these classes hold the bytes: one
data file a rank, hashed and fsynced by its writer, and metadata that is JSON. DCP's own storage
pickles its metadata; nothing here is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainkit.runs.manifest import ALIGNMENT, DTYPE_BYTES, DataFile, TensorChunk, TensorEntry

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
PIECE = 2**24  # bytes that are written, or read where they have to be put in place, at once
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def create(path: Path) -> FileIO:
    """A new file to write, without a buffer. Raises FileExistsError: somebody else writes there."""
    return open(path, "xb", buffering=0)


def write_whole(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of it: one call may take less than it was given (2 GiB on Linux, less where the
    disk fills up). Raises OSError as the disk does."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class TensorSavePlanner(DefaultSavePlanner):
    """Plans tensors only; a rank whose shard is empty plans nothing for it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = SavePlan(
            [item for item in plan.items if 0 not in _box(item).sizes],
            plan.storage_data,
            plan.planner_data,
        )
        return self.plan


class TensorLoadPlanner(DefaultLoadPlanner):
    """Refuses anything but tensors: DCP's own would unpickle the rest."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise TypeError(
            f"{read_item.dest_index.fqn} is not a tensor; a checkpoint holds only tensors"
        )


def _box(item: WriteItem) -> ChunkStorageMetadata:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor; a checkpoint holds only tensors")
    return item.tensor_data.chunk


def _file_bytes(plan: SavePlan) -> int:
    """Of the file that a rank writes by this plan."""
    end = 0
    for item in plan.items:
        assert item.tensor_data is not None, item.index  # the planner lets nothing else pass
        end += (
            -end % ALIGNMENT
            + math.prod(_box(item).sizes) * item.tensor_data.properties.dtype.itemsize
        )
    return end


class HashingWriter:
    """A new file that is hashed beside its writing, piece by piece; `on_progress` is called after
    each. The disk begins with a piece while the next one is copied: left to `fsync`, it would
    stand idle until then."""

    def __init__(
        self, file: FileIO, beside: ThreadPoolExecutor, on_progress: Callable[[], None]
    ) -> None:
        self.file = file
        self.beside = beside
        self.on_progress = on_progress
        self.end = self._begun = 0  # bytes written, bytes that the disk has begun to take
        self._digest = xxhash.xxh3_128()

    def write(self, data: memoryview) -> None:
        """Raises OSError as the disk does."""
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            # at 10 GB/s it would still be a tenth of the time of a fast disk
            hashed = self.beside.submit(self._digest.update, piece)
            write_whole(self.file, piece)
            hashed.result()
            self.end += len(piece)
            if self.end - self._begun >= PIECE:
                # a hint: what goes wrong with these pages is fsync's to say
                with contextlib.suppress(OSError):
                    os.posix_fadvise(
                        self.file.fileno(),
                        self._begun,
                        self.end - self._begun,
                        os.POSIX_FADV_DONTNEED,
                    )
                self._begun = self.end
            self.on_progress()

    def finish(self) -> str:
        """Make it durable; returns the xxh128 of all that was written. Raises OSError as the
        disk does, and where it has another size."""
        os.fsync(self.file.fileno())
        if (there := os.fstat(self.file.fileno()).st_size) != self.end:
            raise OSError(
                errno.EIO, f"the file system has {there} of {self.end} bytes", str(self.file.name)
            )
        return self._digest.hexdigest()


class DcpWriter(StorageWriter):
    """Writes this rank's parts into `folder`/rank-NNNNN.bin, calling `on_progress` again and again.

    `reserve` is called on rank 0, before anything is written, with the bytes that all ranks will
    write together; its OSError is raised on all of them. After a save, `files` and `tensors`
    hold the manifest's tables on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        on_progress: Callable[[], None] = lambda: None,
        reserve: Callable[[int], None] = lambda needed: None,
    ) -> None:
        self.folder = folder
        self.name = f"rank-{rank:05d}.bin"
        self.on_progress = on_progress
        self._reserve_room = reserve
        self.files: list[DataFile] = []
        self.tensors: dict[str, TensorEntry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """What many ranks hold is in one plan only by now: what replicas there are does not
        count."""
        self._reserve_room(sum(_file_bytes(plan) for plan in plans))
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all planned parts one after another; raises OSError as the disk does."""
        if not plan.items:
            return _done([])
        parts = []
        with create(self.folder / self.name) as file, ThreadPoolExecutor(1) as beside:
            stream = HashingWriter(file, beside, self.on_progress)
            for item in plan.items:
                part = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                stream.write(memoryview(bytes(-stream.end % ALIGNMENT)))
                box = _box(item)
                start = stream.end
                stream.write(part.flatten().view(torch.uint8).numpy().data)
                parts.append(
                    (
                        item.index,
                        TensorChunk(
                            offsets=tuple(box.offsets),
                            sizes=tuple(box.sizes),
                            file=self.name,
                            start=start,
                            bytes=part.nbytes,
                        ),
                    )
                )
            written = DataFile(path=self.name, bytes=stream.end, xxh128=stream.finish())
        return _done([WriteResult(index, chunk.bytes, (chunk, written)) for index, chunk in parts])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect all ranks' results (rank 0)."""
        chunks: dict[str, list[TensorChunk]] = {}
        files: dict[str, DataFile] = {}
        for result in (r for of_rank in results for r in of_rank):
            chunk, written = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            files[written.path] = written
        self.files = sorted(files.values(), key=lambda f: f.path)
        for name, entry in sorted(metadata.state_dict_metadata.items()):
            # the planner lets nothing else pass
            assert isinstance(entry, TensorStorageMetadata), name
            self.tensors[name] = TensorEntry(
                shape=tuple(entry.size),
                dtype=DTYPE_NAMES[entry.properties.dtype],
                chunks=tuple(chunks[name]),
            )


class DcpReader(StorageReader):
    """Reads parts of the tensors of a checked manifest from `folder`: only the rows that are
    needed."""

    def __init__(self, folder: Path, tensors: dict[str, TensorEntry]) -> None:
        self.folder = folder
        self.tensors = tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        def entry(tensor: TensorEntry) -> TensorStorageMetadata:
            boxes = [
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in tensor.chunks
            ]
            return TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), boxes
            )

        return Metadata({name: entry(tensor) for name, tensor in self.tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.chunks = {
            MetadataIndex(name, c.offsets): c
            for name, tensor in self.tensors.items()
            for c in tensor.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned overlap into the tensor that asked for it. Raises OSError as the
        disk does (a mapped file would kill the process)."""
        with contextlib.ExitStack() as stack:
            opened: dict[str, FileIO] = {}
            for item in plan.items:
                if item.type != LoadItemType.TENSOR:
                    raise TypeError(
                        f"{item.dest_index.fqn} is not a tensor; a checkpoint holds only tensors"
                    )
                chunk = self.chunks[item.storage_index]
                dtype = DTYPES[self.tensors[item.storage_index.fqn].dtype]
                if chunk.file not in opened:
                    opened[chunk.file] = stack.enter_context(
                        open(self.folder / chunk.file, "rb", buffering=0)
                    )
                target = planner.resolve_tensor(item).detach()
                _read_box(
                    opened[chunk.file],
                    chunk,
                    dtype,
                    tuple(item.storage_offsets),
                    tuple(item.lengths),
                    target,
                )
                planner.commit_tensor(item, target)
        return _done(None)


def _read_box(
    file: FileIO,
    chunk: TensorChunk,
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    target: torch.Tensor,
) -> None:
    """Read a box of a chunk into `target`: rows that lie one after another straight into its
    memory, of others some whole rows at a time."""
    offsets = offsets or (0,)
    lengths = lengths or (1,)
    sizes = chunk.sizes or (1,)
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    start = chunk.start + row_bytes * offsets[0]
    if (
        lengths[1:] == sizes[1:]
        and target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
    ):
        read_whole(file, target, start)
        return
    step = max(1, PIECE // row_bytes)
    columns = [slice(at, at + n) for at, n in zip(offsets[1:], lengths[1:], strict=True)]
    room = torch.empty((min(step, lengths[0]), *sizes[1:]), dtype=dtype)
    target = target.view(lengths)
    for first in range(0, lengths[0], step):
        rows = room[: lengths[0] - first]
        read_whole(file, rows, start + row_bytes * first)
        target[first : first + len(rows)] = rows[(slice(None), *columns)]


def read_whole(file: FileIO, target: torch.Tensor, start: int) -> None:
    """Fill a contiguous tensor of the CPU with what lies at byte `start`. Raises OSError as the
    disk does, and where the file ends before."""
    rest = target.view(-1).view(torch.uint8).numpy().data
    while rest:
        done = os.preadv(file.fileno(), [rest], start)
        if done == 0:
            raise OSError(errno.EIO, f"the file ends {len(rest)} bytes too early", str(file.name))
        rest = rest[done:]
        start = start + done
