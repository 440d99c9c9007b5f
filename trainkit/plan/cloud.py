"""The layouts of a search as points: memory and speed, and those that none other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of, padded_vocab_size
from trainkit.plan.memory import memory_of
from trainkit.plan.objection import try_change
from trainkit.plan.rules import Rules
from trainkit.plan.search import Ranked, describe
from trainkit.plan.suggestions import MICRO, RECOMPUTE

MOST = 300  # points of a picture
FASTEST = 20  # kinds on each number of nodes that are always among them
GRANULARITIES = ("none", "selective", "full")  # of recomputation: each leaves less
TRIES = 4  # micro-batches of one kind of layout until one fits


@dataclass(frozen=True)
class Point:
    """The fastest micro-batch of one kind of layout that fits.

    Args:
        layout: in words.
        nodes: that it runs on.
        tokens_per_second: predicted.
        bytes: of its fullest rank.
    """

    layout: str
    nodes: int
    tokens_per_second: float
    bytes: int


def cloud(candidates: Sequence[Ranked], rules: Rules, vocab: int) -> list[Point]:
    """A point for each kind of layout (all but its micro-batch), fastest first; of many kinds on a
    number of nodes the fastest and others at even distances, since memory takes its time. The
    fastest that fits is always among them.

    Args:
        candidates: of a search, fastest first.
        rules: of the engine.
        vocab: ids, without padding.
    """
    kinds: dict[int, dict[object, list[Ranked]]] = {}
    for each in candidates:
        key = tuple((path, value) for path, value in each.change.items() if path != MICRO)
        kinds.setdefault(each.job.nodes, {}).setdefault(key, []).append(each)
    found: list[Point] = []
    for of_nodes in kinds.values():
        groups = list(of_nodes.values())
        step = -(-len(groups) * len(kinds) // MOST)
        for index, group in enumerate(groups):
            if index < FASTEST or index % step == 0:
                found += _first_that_fits(group[:TRIES], rules, vocab)
    found += _fastest(candidates, rules, vocab)
    return sorted(dict.fromkeys(found), key=lambda point: -point.tokens_per_second)


def _fastest(candidates: Sequence[Ranked], rules: Rules, vocab: int) -> list[Point]:
    """Of each number of nodes the fastest that fits, however many faster ones do not."""
    found: dict[int, Point] = {}
    enough = nodes_with_room(candidates, rules, vocab)
    for each in candidates:
        if each.job.nodes in enough and each.job.nodes not in found:
            for point in _first_that_fits([each], rules, vocab):
                found[each.job.nodes] = point
    return list(found.values())


def nodes_with_room(candidates: Iterable[Ranked], rules: Rules, vocab: int) -> set[int]:
    """Numbers of nodes on which any candidate fits. Of each layout only the leanest is looked at:
    where the smallest micro-batch with most recomputation has no room, no other has."""
    leanest: dict[tuple[object, ...], Ranked] = {}
    for each in candidates:
        rest = [pair for pair in each.change.items() if pair[0] not in (MICRO, RECOMPUTE)]
        kind = (each.job.nodes, *rest)
        if kind not in leanest or _leanness(each) < _leanness(leanest[kind]):
            leanest[kind] = each
    found: set[int] = set()
    for each in leanest.values():
        room = each.job.cluster.device.memory_bytes
        if each.job.nodes not in found and (room is None or _bytes(each.job, rules, vocab) <= room):
            found.add(each.job.nodes)
    return found


def _leanness(candidate: Ranked) -> tuple[int, int]:
    training = candidate.job.training
    return training.micro_batch_size, -GRANULARITIES.index(training.recompute_granularity)


def _first_that_fits(group: list[Ranked], rules: Rules, vocab: int) -> list[Point]:
    """At most one point."""
    for each in group:
        size = _bytes(each.job, rules, vocab)
        room = each.job.cluster.device.memory_bytes
        fits = room is None or size <= room
        if fits and try_change(each.job, each.change):  # the schema takes it
            return [Point(describe(each.change), each.job.nodes, each.tokens_per_second, size)]
    return []


def thinned(points: list[Point], most: int = MOST) -> list[Point]:
    """As many as a picture shows: the front, and others at even distances."""
    step = -(-len(points) // most)
    front = set(pareto(points))
    return [point for index, point in enumerate(points) if index % step == 0 or point in front]


def pareto(points: Iterable[Point]) -> list[Point]:
    """Those that no other beats in both speed and memory, fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.tokens_per_second, p.bytes)):
        if not front or point.bytes < front[-1].bytes:
            front.append(point)
    return front


def best_by_nodes(points: Iterable[Point]) -> dict[int, float]:
    """Tokens a second of the fastest on each number of nodes."""
    best: dict[int, float] = {}
    for point in points:
        best[point.nodes] = max(best.get(point.nodes, 0.0), point.tokens_per_second)
    return dict(sorted(best.items()))


def _bytes(job: Job, rules: Rules, vocab: int) -> int:
    layout = layout_of(job)
    padded = padded_vocab_size(vocab, job.model.make_vocab_size_divisible_by, layout.tensor)
    return memory_of(job, layout, rules, vocab, padded).fullest.total_bytes
