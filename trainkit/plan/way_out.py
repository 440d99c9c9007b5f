"""The nearest numbers of nodes and global batches for which a job has a layout, where it has
none as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainkit.jobs.schema import Job
from trainkit.plan.checks import BATCH
from trainkit.plan.objection import Change, try_change
from trainkit.plan.rules import Rules

FACTOR = 4  # times more or fewer nodes that are looked at
BATCHES = 4  # that are tried


def data_degrees(job: Job, rules: Rules) -> Iterator[int]:
    """Data-parallel sizes of the job's ranks, as far as arithmetic goes: tensor parallelism
    within a node, stages that the engine can fill."""
    layers = job.model.num_layers
    for tensor in range(1, job.ranks_per_node + 1):
        for pipeline in range(1, layers + 1):
            data, rest = divmod(job.world_size, tensor * pipeline)
            if not rest and (rules.uneven_stages or layers % pipeline == 0):
                yield data


def ways_out(job: Job, rules: Rules, possible: Callable[[Job], bool]) -> list[Change]:
    """Changes after each of which some layout can be: fewer nodes, more, another batch.

    Args:
        job: that has none.
        rules: of its engine.
        possible: whether a job has a layout.
    """
    nodes = job.nodes
    most = min(job.cluster.max_nodes or FACTOR * nodes, FACTOR * nodes)
    below = min(nodes - 1, most)
    found = [
        _first(job, rules, ({"nodes": number} for number in numbers), possible)
        for numbers in (range(below, below // FACTOR, -1), range(nodes + 1, most + 1))
    ]
    batch = job.global_batch_size
    sizes = {near for data in data_degrees(job, rules) for near in _multiples(batch, data)}
    nearest = sorted(sizes - {batch}, key=lambda size: (abs(size - batch), size))[:BATCHES]
    found.append(_first(job, rules, ({BATCH: size} for size in nearest), possible))
    return [change for change in found if change]


def _multiples(number: int, of: int) -> set[int]:
    """The nearest below and above."""
    below = number // of * of
    return {below, below + of} - {0}


def _first(
    job: Job, rules: Rules, changes: Iterator[Change], possible: Callable[[Job], bool]
) -> Change | None:
    """The first change after which a layout can be; what arithmetic rules out is not tried."""
    plain = job.training.model_copy(update={"gradient_accumulation_steps": None})
    plain = plain.model_copy(update={"global_batch_size": job.global_batch_size})
    for change in changes:
        tried = try_change(job.model_copy(update={"training": plain}), change)
        if tried is None:
            continue
        batch = tried.global_batch_size
        if any(batch % data == 0 for data in data_degrees(tried, rules)) and possible(tried):
            return change
    return None
