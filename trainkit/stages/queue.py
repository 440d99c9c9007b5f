"""The order in which units of a stage begin."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from trainkit.stages.contract import Unit

# bytes of units that share a process, how many do at most, and turns that are left for each process
# then
SMALL = 2**26
BATCH = 16
TURNS = 4


class UnitQueue:
    """Units in the order their `after` asks for; of those that could begin, the largest first,
    so that none is left for the end."""

    def __init__(self, units: Sequence[Unit]) -> None:
        names = {unit.name for unit in units}
        self._number = {unit.name: number for number, unit in enumerate(units)}
        self._waits_for = {unit.name: len(names.intersection(unit.after)) for unit in units}
        self._followers: dict[str, list[Unit]] = {}
        self._ready: dict[bool, list[tuple[int, int, Unit]]] = {False: [], True: []}
        for unit in units:
            for name in names.intersection(unit.after):
                self._followers.setdefault(name, []).append(unit)
            self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        if self._waits_for[unit.name] == 0:
            heapq.heappush(self._ready[unit.network], (-unit.size, self._number[unit.name], unit))

    def take(self, free: Mapping[bool, int], most: Mapping[bool, int]) -> Iterator[list[Unit]]:
        """Units to begin now, those of a list in one process: at most free[network] processes of
        either kind, of most[network] there may be."""
        for network, slots in free.items():
            ready = self._ready[network]
            for _ in range(min(slots, len(ready))):
                if not ready:
                    break
                batch = [heapq.heappop(ready)[2]]
                # as many as leave all processes several turns: nobody is to wait for one long list
                # at the end
                if batch[0].several and batch[0].size <= SMALL:
                    length = min(BATCH, len(ready) // (TURNS * most[network]))
                else:
                    length = 0
                while (
                    len(batch) <= length
                    and ready[0][2].several
                    and ready[0][2].argv == batch[0].argv
                ):
                    batch.append(heapq.heappop(ready)[2])
                yield batch

    def done(self, unit: Unit) -> None:
        """A unit has succeeded: others may begin."""
        for follower in self._followers.pop(unit.name, ()):
            self._waits_for[follower.name] -= 1
            self._offer(follower)

    def again(self, unit: Unit) -> None:
        """A unit that was taken has to be done once more: its host was lost."""
        self._offer(unit)

    def waiting(self) -> list[str]:
        """Names of units that still wait for another."""
        return [name for name, count in self._waits_for.items() if count]

    def __bool__(self) -> bool:
        return any(self._ready.values())
