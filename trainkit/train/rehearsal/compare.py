"""Whether ranks would understand each other: in every group the same operations, of the same
sizes, in the same order; and for every send a recv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.train.rehearsal.recorder import CollectiveCall
from trainkit.train.rehearsal.trace import RankTrace

SHOWN = 4  # ranks of a group that a message names


@dataclass(frozen=True)
class Disagreement:
    """Two ranks of a group that would wait for each other without end, or mix up numbers.

    Args:
        group: the ranks of the group, or the two of a send and a recv.
        number: which of the group's operations, from 1.
        one, other: a rank, and what it does there; None: it has done all it does.
    """

    group: tuple[int, ...]
    number: int
    one: tuple[int, CollectiveCall | None]
    other: tuple[int, CollectiveCall | None]

    @property
    def message(self) -> str:
        ranks = ", ".join(map(str, self.group[:SHOWN]))
        if len(self.group) > SHOWN:
            ranks += f", ... {self.group[-1]}"
        return (
            f"operation {self.number} between ranks {ranks}: {_words(*self.one)}, and"
            f" {_words(*self.other)}"
        )


def _words(rank: int, call: CollectiveCall | None) -> str:
    if call is None:
        return f"rank {rank} has no more"
    return f"rank {rank} does {call.words} ({call.where})"


def compare_traces(traces: Sequence[RankTrace]) -> list[Disagreement]:
    """The first disagreement of every group; of groups of which one rank was traced, none."""
    return [*_in_groups(traces), *_between_pairs(traces)]


def compared_groups(traces: Sequence[RankTrace]) -> int:
    """How many groups have at least two of the ranks that were traced."""
    ranks = [trace.rank for trace in traces]
    groups = {call.group for trace in traces for call in trace.calls if call.peer < 0}
    return sum(sum(rank in group for rank in ranks) > 1 for group in groups)


def _in_groups(traces: Sequence[RankTrace]) -> Iterator[Disagreement]:
    groups: dict[tuple[int, ...], dict[int, list[CollectiveCall]]] = {}
    for trace in traces:
        for call in trace.calls:
            if call.peer < 0:
                groups.setdefault(call.group, {}).setdefault(trace.rank, []).append(call)
    traced = [trace.rank for trace in traces]
    for group, by_rank in groups.items():
        # one of the group that says nothing in it disagrees too
        members = [rank for rank in traced if rank in group]
        first = members[0]
        for rank in members[1:]:
            found = _difference(by_rank.get(first, []), by_rank.get(rank, []))
            if found is not None:
                number, one, other = found
                yield Disagreement(group, number, (first, one), (rank, other))
                break


def _difference(
    one: Sequence[CollectiveCall], other: Sequence[CollectiveCall]
) -> tuple[int, CollectiveCall | None, CollectiveCall | None] | None:
    for number, (a, b) in enumerate(zip_longest(one, other), start=1):
        if a is None or b is None or (a.operation, a.sizes) != (b.operation, b.sizes):
            return number, a, b
    return None


def _between_pairs(traces: Sequence[RankTrace]) -> Iterator[Disagreement]:
    sent = _by_pair(traces, "send")
    received = _by_pair(traces, "recv")
    traced = {trace.rank for trace in traces}
    for pair in sorted({*sent, *received}):
        if not traced.issuperset(pair):
            continue
        calls = zip_longest(sent.get(pair, []), received.get(pair, []))
        for number, (out, into) in enumerate(calls, start=1):
            if out is None or into is None or out.sizes != into.sizes:
                yield Disagreement(pair, number, (pair[0], out), (pair[1], into))
                break


def _by_pair(
    traces: Sequence[RankTrace], operation: str
) -> Mapping[tuple[int, int], list[CollectiveCall]]:
    """Sends, or recvs, by (who sends, who receives)."""
    found: dict[tuple[int, int], list[CollectiveCall]] = {}
    for trace in traces:
        for call in trace.calls:
            if call.operation == operation and call.peer >= 0:
                pair = (trace.rank, call.peer)
                if operation == "recv":
                    pair = (call.peer, trace.rank)
                found.setdefault(pair, []).append(call)
    return found
