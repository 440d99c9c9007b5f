"""A second copy of each rank's state, on another host: what a host's end takes with it, its partner
still has. Hosts are partners by pairs, so that of two hosts that are lost together few are of one
pair; the last three of an odd number go round.

A rank sends its newest copy to the rank with its place on the partner host, behind training, and
receives that rank's own, or its ward's, into a file of two slots like its own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.train.checkpoint.memory_slot import PAGE, STEP_AT, Copy, Slot, map_slots
from trainkit.train.parallel.data_parallel import World

# a piece that takes longer never comes; no copy is made meanwhile, but nothing else waits for it
LINE_SECONDS = 300.0


def keeper_of(node: int, nodes: int) -> int:
    """The host, of at least two, that keeps the second copy of `node`'s state."""
    if nodes % 2 and node >= nodes - 3:
        return nodes - 3 + (node - nodes + 4) % 3
    return node ^ 1


class PartnerCopy:
    """What this rank keeps for its ward, and where its own state goes. All ranks make theirs
    together.

    Args:
        world: this rank among the others.
        node_ranks: ranks of each host, of which there are at least two.
        length: bytes of a slot of this rank.
    """

    def __init__(self, world: World, node_ranks: int, length: int) -> None:
        nodes = world.size // node_ranks
        keepers = [keeper_of(node, nodes) for node in range(nodes)]
        node, place = divmod(world.rank, node_ranks)
        self.keeper = keepers[node] * node_ranks + place
        self.ward = keepers.index(node) * node_ranks + place
        # Of all ranks, for one of a pair could have another name at each of the two; and apart from
        # the default one, for two threads that talk in one group abort it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LINE_SECONDS))
        theirs = torch.zeros(1, dtype=torch.int64)
        self._exchange(torch.tensor([length]), theirs)
        self._length = int(theirs)
        self.bytes = 2 * self._length  # of the file
        self._slots: list[Slot] = []
        self._next = 0
        self.hurries = False  # the line is not shared any more

    def open(self, path: Path) -> None:
        """Map the file. Raises OSError where the memory of the host has no room for it."""
        memory = map_slots(path, self.bytes)
        self._slots = [Slot(memory, start, self._length) for start in (0, self._length)]

    def held(self) -> dict[str, set[Copy]]:
        """What is here, as it says, by whose it is."""
        found: dict[str, set[Copy]] = {}
        for slot in self._slots:
            if described := slot.describe():
                found.setdefault(described.state, set()).add(described.which)
        return found

    def slot_with(self, state: str, copy: Copy) -> Slot:
        """Where one of those that are held is."""
        return next(
            slot
            for slot in self._slots
            if (found := slot.describe()) and (found.state, found.which) == (state, copy)
        )

    def keep(self, copy: Copy) -> None:
        """Training goes on from this one: what is received next does not take its place, and any
        other one is never believed again."""
        for number, slot in enumerate(self._slots):
            if (found := slot.describe()) and found.which == copy:
                self._next = 1 - number
            else:
                slot.forget()

    def ship(self, own: Slot) -> None:
        """Send a copy to the keeper, and receive the ward's; for a thread of its own. Half of the
        time the line is left to training. Raises RuntimeError where a peer is gone, or silent for
        LINE_SECONDS."""
        room = self._slots[self._next]
        self._next = 1 - self._next
        room.forget()
        nothing = torch.empty(0)
        shortest = float("inf")
        for sent, received in zip_longest(own.pieces(PAGE), room.pieces(PAGE), fillvalue=nothing):
            began = time.perf_counter()
            self._exchange(sent, received)
            # a piece that took longer waited for its peer, which must not wait for us then
            shortest = min(shortest, time.perf_counter() - began)
            time.sleep(0 if self.hurries else shortest)
        # the first page has the word of the step, which is written last
        head = torch.empty(PAGE, dtype=torch.uint8)
        self._exchange(own.bytes[:PAGE], head)
        word = slice(STEP_AT, STEP_AT + 8)
        room.bytes[word.stop : PAGE] = head[word.stop :]
        room.bytes[: word.start] = head[: word.start]
        room.bytes[word] = head[word]

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        works = []
        if sent.numel():
            works.append(dist.isend(sent, self.keeper, group=self._group))
        if received.numel():
            works.append(dist.irecv(received, self.ward, group=self._group))
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
