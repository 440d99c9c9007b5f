"""A second copy of each rank's state, on another host: what a host's end takes with it, its partner
still has. Hosts are partners by pairs, so that of two hosts that are lost together few are of one
pair; the last three of an odd number go round.

A rank sends its newest copy to the rank with its place on the partner host, behind training, and
receives that rank's own, or its ward's, into a file of two slots like its own.
"""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.train.checkpoint.memory_slot import PAGE, STEP_AT, Copy, Slot, map_slots
from trainkit.train.parallel.data_parallel import World


def keeper_of(node: int, nodes: int) -> int:
    """The host, of at least two, that keeps the second copy of `node`'s state."""
    if nodes % 2 and node >= nodes - 3:
        return nodes - 3 + (node - nodes + 4) % 3
    return node ^ 1


class PartnerCopy:
    """What this rank keeps for its ward, and where its own state goes. All ranks make theirs
    together.

    Args:
        folder: of the host's copies.
        world: this rank among the others.
        node_ranks: ranks of each host, of which there are at least two.
        length: bytes of a slot of this rank.

    Raises OSError where the memory of the host has no room.
    """

    def __init__(self, folder: Path, world: World, node_ranks: int, length: int) -> None:
        nodes = world.size // node_ranks
        keepers = [keeper_of(node, nodes) for node in range(nodes)]
        node, place = divmod(world.rank, node_ranks)
        self._keeper = keepers[node] * node_ranks + place
        self._ward = keepers.index(node) * node_ranks + place
        pairs = sorted({_pair(world.rank, self._keeper), _pair(world.rank, self._ward)})
        # Groups of their own: two threads that talk in the default one abort it.
        groups = {
            pair: dist.new_group(list(pair), backend="gloo", use_local_synchronization=True)
            for pair in pairs
        }
        self._to = groups[_pair(world.rank, self._keeper)]
        self._from = groups[_pair(world.rank, self._ward)]
        theirs = torch.zeros(1, dtype=torch.int64)
        self._exchange(torch.tensor([length]), theirs)
        length = int(theirs)
        memory = map_slots(folder / f"{world.rank}.partner", 2 * length)
        self._slots = [Slot(memory, start, length) for start in (0, length)]
        self._next = 0

    def held(self) -> dict[str, set[Copy]]:
        """What is here, as it says, by whose it is."""
        found: dict[str, set[Copy]] = {}
        for slot in self._slots:
            if (described := slot.describe()) and (copy := slot.copy):
                found.setdefault(described[0], set()).add(copy)
        return found

    def slot_with(self, copy: Copy) -> Slot:
        """Where one of those that are held is."""
        return next(slot for slot in self._slots if slot.copy == copy)

    def keep(self, copy: Copy) -> None:
        """Training goes on from this one: what is received next does not take its place, and any
        other one is never believed again."""
        for number, slot in enumerate(self._slots):
            if slot.copy == copy:
                self._next = 1 - number
            else:
                slot.forget()

    def ship(self, own: Slot) -> None:
        """Send a copy to the keeper, and receive the ward's; for a thread of its own. Half of the
        time the line is left to training. Raises RuntimeError where a peer is gone."""
        room = self._slots[self._next]
        self._next = 1 - self._next
        room.forget()
        nothing = torch.empty(0)
        for sent, received in zip_longest(own.pieces(PAGE), room.pieces(PAGE), fillvalue=nothing):
            began = time.perf_counter()
            self._exchange(sent, received)
            time.sleep(time.perf_counter() - began)
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
            works.append(dist.isend(sent, self._keeper, group=self._to))
        if received.numel():
            works.append(dist.irecv(received, self._ward, group=self._from))
        for work in works:
            assert work is not None  # this rank is in both groups
            work.wait()


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)
