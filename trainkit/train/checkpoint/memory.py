"""The newest state in memory: what a checkpoint holds, copied every few steps into a file in the
host's memory, which outlives the ranks. Ranks that begin again go on from it.

A rank's file has two slots, written by turns: a kill in the middle of a copy leaves the other one
whole. Where there are several hosts a copy goes on to a partner host, and no slot is written again
before the other's copy is there, of all ranks: so all of them have one step in common, whichever
host is lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.printable import warn
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint.memory_slot import Copy, MemorySlot, map_slots, table_of
from trainkit.train.checkpoint.partner import PartnerCopy
from trainkit.train.checkpoint.save_load import CheckpointMetadata, layout_entry
from trainkit.train.checkpoint.staging import copy_all, parts_of
from trainkit.train.parallel.data_parallel import World

FOLDER_VARIABLE = "TRAINKIT_MEMORY_FOLDER"  # the agent's, on each of its ranks
LEFT_OUT = 10  # copies in a row that are worth a warning
CLOSE_SECONDS = 2.0  # for a copy to arrive at a partner when the run ends


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others that it has.

    Args:
        state: whose state it writes, in short.
        own: copies of it that it has.
        held: others' on its host, by whose they are.
    """

    state: str
    own: set[Copy]
    held: dict[str, set[Copy]]


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
        with self._refusal(Path(folder), 2 * length, "its state"):
            self._memory = map_slots(Path(folder) / f"{world.rank}.state", 2 * length)
        self._partner: PartnerCopy | None = None
        if world.size > self._node_ranks:
            self._partner = partner = PartnerCopy(world, self._node_ranks, length)
            with self._refusal(Path(folder), partner.bytes, f"that of rank {partner.ward}"):
                partner.open(Path(folder) / f"{world.rank}.partner")
        self._slots = [MemorySlot(self._memory, start, of, table, size) for start in (0, length)]
        self._next = 0  # the slot of the next copy
        self._said: list[_Said] = []
        self._common: list[Copy] = []
        self.source: Literal["memory", "partner"] = "memory"  # of what `load` has found
        self._cuda = any(part.is_cuda for t in tensors.values() for part in parts_of(t).values())
        if self._cuda:
            self._lock_pages()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._copied: Future[None] | None = None
        self._sealed: Future[None] | None = None
        self._line = ThreadPoolExecutor(1, thread_name_prefix="partner")
        self._shipped: Future[None] | None = None
        self._asked = job.checkpoint
        self._due = 0  # of copies by time: the step of the next one
        self._last = (-1, -math.inf)  # step of the last one, and when it began
        self._cut = False  # the way to a partner, of this rank or another
        self._left_out = 0  # copies in a row, for the last one was still on its way

    @property
    def copying(self) -> bool:
        """Whether `wait_for_copying` would wait."""
        return self._copied is not None and not self._copied.done()

    def wait_for_copying(self) -> None:
        """Wait until the tensors may change; on CUDA that is at once."""
        if self._copied is not None:
            self._copied.result()

    def due(self, step: int) -> bool:
        """Whether this step is to be copied."""
        if steps := self._asked.memory_steps:
            return step % steps == 0
        return step >= self._due

    def _plan_next(self, step: int) -> None:
        """Of copies by time: which step is the next, by the slowest rank's time of a step since the
        last copy. All ranks get the same answer."""
        took = torch.tensor((time.monotonic() - self._last[1]) / (step - self._last[0]))
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self._due = step + max(1, int(self._asked.memory_seconds / float(took)))
        self._last = (step, time.monotonic())

    def copy(
        self, metadata: CheckpointMetadata, before_shipping: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to copy the state of this step behind training: the tensors must not change before
        `wait_for_copying` has returned. Where the last copy is still on its way to a partner, this
        step is left out, by all ranks.

        Args:
            metadata: what belongs to it.
            before_shipping: called, in another thread, before a partner gets it.
        """
        if self._asked.memory_seconds:
            self._plan_next(metadata.step)
        if self._partner and not self._may_overwrite():
            return
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
        self._ship(slot, before_shipping)

    def _may_overwrite(self) -> bool:
        """Whether no copy is on its way to a partner, of any rank."""
        shipping = self._shipped is not None and not self._shipped.done()
        if self._shipped is not None and not shipping:
            self._shipped.result()
        said = torch.tensor([shipping, self._cut], dtype=torch.int32)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        shipping, self._cut = map(bool, said)
        self._left_out = self._left_out + 1 if shipping else 0
        if self._left_out == LEFT_OUT and self._world.rank == 0:
            warn(
                f"{LEFT_OUT} copies in memory in a row were left out: the last one is still on its"
                " way to another host; a larger checkpoint.memory_interval leaves more time"
            )
        return not shipping

    def _ship(self, slot: MemorySlot, before: Callable[[], None] = lambda: None) -> None:
        """Begin to bring a copy to the partner host."""
        if not self._partner or self._cut:
            return
        sealed = self._sealed
        partner = self._partner

        def ship() -> None:
            if sealed is not None:
                sealed.result()
            before()
            try:
                partner.ship(slot)
            except RuntimeError as error:
                self._cut = True  # all ranks hear of it at the next copy
                warn(
                    f"rank {self._world.rank}: no copies in memory go to another host until the"
                    f" ranks start again: to rank {partner.keeper}, from {partner.ward}: {error}"
                )

        self._shipped = self._line.submit(ship)

    def find(self, published: int) -> int:
        """Look which steps all ranks have, in memory of the run as it went on last; `load` takes
        one of them.

        Args:
            published: the step of the newest checkpoint, by rank 0.

        Returns rank 0's `published`.
        """
        # which copies are believed: those of a timeline, and the one that it began from
        believed: list[Any] = ["", None]
        if self._world.rank == 0:
            with contextlib.suppress(OSError, ValueError, TypeError):
                word, origin = json.loads(self._timeline_file.read_text())
                believed = [word, origin and tuple(origin)]
        mine = {found.which for slot in self._slots if (found := slot.describe())}
        held = self._partner.held() if self._partner else {}
        said: list[tuple[_Said, int, list[Any]]] = [(_Said("", set(), {}), 0, [])]
        said *= self._world.size
        own = _Said(self._slots[0].state, mine, held)
        dist.all_gather_object(said, (own, published, believed))
        _, published, (self._timeline, origin) = said[0]
        self._said = [of_rank for of_rank, _, _ in said]
        everywhere: dict[str, set[Copy]] = {}
        for of_rank in self._said:
            for state, copies in ((of_rank.state, of_rank.own), *of_rank.held.items()):
                everywhere.setdefault(state, set()).update(copies)
        common = set.intersection(*(everywhere[of_rank.state] for of_rank in self._said))
        self._common = sorted(
            (copy for copy in common if copy == origin or copy[1] == self._timeline != ""),
            reverse=True,
        )
        return published

    @torch.no_grad()
    def load(self, least: int) -> CheckpointMetadata | None:
        """Read the newest copy that all ranks have whole into the tensors.

        Args:
            least: of this step or a later one.

        Returns what was saved with it; None where there is none.
        """
        for copy in self._common:
            if copy[0] < least:
                break
            slot = self._verified(copy)
            if slot is None:
                continue
            for name, tensor in self._tensors.items():
                for at, part in parts_of(tensor).items():
                    if part.numel():
                        part.copy_(slot.rooms[name, at])
            self._keep(slot)
            if self._partner:
                self._partner.keep(copy)
                self._ship(slot)
            self._begin_timeline(copy)
            found = slot.describe()
            assert found
            return CheckpointMetadata(**found.saved)
        return None

    def _verified(self, copy: Copy) -> MemorySlot | None:
        """The slot with a copy, which is whole: here, or at a partner, from where it is
        fetched. None where any rank's is whole nowhere."""
        slot = self._whole_slot(copy)
        there = [False] * self._world.size
        dist.all_gather_object(there, slot is not None)
        if all(there):
            self.source = "memory"
            return slot
        self._fetch(copy, there)
        slot = slot or self._whole_slot(copy)
        dist.all_gather_object(there, slot is not None)
        self.source = "partner"
        return slot if all(there) else None

    def _whole_slot(self, copy: Copy) -> MemorySlot | None:
        for slot in self._slots:
            if (found := slot.describe()) and found.which == copy:
                if slot.is_whole():
                    return slot
                warn(f"rank {self._world.rank}: the copy of step {copy[0]} in memory is damaged")
                slot.forget()
        return None

    def _fetch(self, copy: Copy, there: list[bool]) -> None:
        """Bring copies to the ranks that have none from those that hold one for them."""
        for rank, has_it in enumerate(there):
            if has_it:
                continue
            state = self._said[rank].state
            holders = [n for n, said in enumerate(self._said) if copy in said.held.get(state, ())]
            if self._partner and self._world.rank in holders[:1]:
                for piece in self._partner.slot_with(state, copy).pieces():
                    dist.send(piece, rank)
            elif self._world.rank == rank and holders:
                free = (slot for slot in self._slots if slot.describe() is None)
                for piece in next(free, self._slots[0]).pieces():
                    dist.recv(piece, holders[0])

    def begin_timeline(self) -> None:
        """Training goes on from elsewhere than from a copy: those that are here are never believed
        again."""
        self._keep(None)
        self._begin_timeline(None)

    def _begin_timeline(self, origin: Copy | None) -> None:
        """Of other copies than the one that training goes on from, on hosts that do not take part
        too, none is believed from now on: a later look could mix them with copies of the same steps
        made another time, which on GPUs need not be equal."""
        said = [secrets.token_hex(8)]
        dist.broadcast_object_list(said, src=0)
        self._timeline = said[0]
        if self._world.rank == 0:
            try:
                self._timeline_file.parent.mkdir(exist_ok=True)
                write_text(self._timeline_file, json.dumps([self._timeline, origin]))
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._timeline_file.unlink(missing_ok=True)
                warn(f"{self._timeline_file}: {error}; copies in memory are of no use")

    def close(self) -> None:
        """Wait for the copy under way, whatever comes of it: the run has ended, perhaps with
        something worse. On its way to a partner it need not arrive."""
        if self._sealed is not None:
            wait([self._sealed])
        if self._partner and self._shipped is not None:
            self._partner.hurries = True
            wait([self._shipped], CLOSE_SECONDS)

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

    @contextlib.contextmanager
    def _refusal(self, folder: Path, size: int, whose: str) -> Iterator[None]:
        """Memory that has no room for two copies is refused with the sizes."""
        try:
            yield
        except OSError as error:
            disk = os.statvfs(folder)
            raise TrainkitError(
                f"checkpoint.memory_interval: rank {self._world.rank} needs {size / 1e9:.3f} GB in"
                f" {folder} for two copies of {whose}, the {self._node_ranks} ranks of its node"
                f" {self._node_ranks * size / 1e9:.3f} GB, and there are"
                f" {disk.f_bavail * disk.f_frsize / 1e9:.3f} GB free: {error.strerror}",
                exit=Exit.CONFIG,
                hint="give the node a larger tmpfs (clusters.X.node_folder), or leave it out",
            ) from None

    def _lock_pages(self) -> None:
        """So that copies from the device do not keep the host waiting."""
        with memoryview(self._memory) as memory:
            address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, len(self._memory), 0)))


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
