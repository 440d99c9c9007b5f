"""The cheapest change that makes a job fit its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainkit.jobs.schema import Job
from trainkit.plan.checks import BATCH, PP, TP, ZERO
from trainkit.plan.grid_checks import EP
from trainkit.plan.objection import Change, try_change, with_change

RECOMPUTE = "training.recompute_granularity"
MICRO = "training.micro_batch_size"
SEQUENCE = "parallelism.sequence_parallel"
MOST_NODES = 64  # times the nodes asked for, where the cluster does not say how many there are


def _free(job: Job) -> Iterator[Change]:
    """What costs no arithmetic and about the same communication."""
    if job.checkpoint.save_async:
        yield {"checkpoint.save_async": False}
    if job.parallelism.zero_stage == 0:
        yield {ZERO: 1}
    if job.parallelism.tensor_model_parallel_size > 1 and not job.parallelism.sequence_parallel:
        yield {SEQUENCE: True}


def _selective(job: Job) -> Iterator[Change]:
    """Cheap products again: a few per cent."""
    if job.training.recompute_granularity == "none":
        yield {RECOMPUTE: "selective"}


def _same_batch(job: Job, change: Change) -> Iterator[Change]:
    """`change` with what keeps the global batch where that is derived; nothing where it cannot
    be kept."""
    training = job.training
    tried = try_change(job, change)
    if tried is None or tried.global_batch_size == job.global_batch_size:
        yield change
    elif training.gradient_accumulation_steps is None:
        yield {**change, BATCH: job.global_batch_size}
    else:
        steps, rest = divmod(
            job.global_batch_size, tried.training.micro_batch_size * tried.data_parallel_size
        )
        if not rest:
            yield {**change, "training.gradient_accumulation_steps": steps}


def smaller_micro_batches(job: Job) -> Iterator[Change]:
    """Smaller micro-batches: the same work in smaller products."""
    size = job.training.micro_batch_size
    for part in range(size - 1, 0, -1):
        if size % part == 0:
            yield from _same_batch(job, {MICRO: part})


def _full(job: Job) -> Iterator[Change]:
    """A third more arithmetic."""
    if job.training.recompute_granularity != "full":
        yield {RECOMPUTE: "full"}
    elif job.training.recompute_every > 1:
        yield {"training.recompute_every": 1}


def _spread(job: Job) -> Iterator[Change]:
    """Experts on more ranks: their rows are sent."""
    if job.model.moe is not None:
        now, count = job.parallelism.expert_model_parallel_size, job.model.moe.num_experts
        yield from ({EP: n} for n in range(now + 1, count + 1) if count % n == 0)


def _sharded(job: Job) -> Iterator[Change]:
    """More communication a micro-batch."""
    yield from ({ZERO: stage} for stage in range(max(2, job.parallelism.zero_stage + 1), 4))


def _split(job: Job) -> Iterator[Change]:
    """More model parallelism on as many devices: smaller products, a longer bubble."""
    tensor = job.parallelism.tensor_model_parallel_size
    pipeline = job.parallelism.pipeline_model_parallel_size
    for n in range(tensor + 1, job.ranks_per_node + 1):
        if job.ranks_per_node % n == 0:
            yield from _same_batch(job, {TP: n})
    others = job.parallelism.ranks_of_a_sample // pipeline
    for n in range(pipeline + 1, job.model.num_layers + 1):
        if job.world_size % (others * n) == 0:
            yield from _same_batch(job, {PP: n})


def _more_nodes(job: Job) -> Iterator[Change]:
    """More devices: for data parallelism, or for stages at the same data-parallel size; few
    before many."""
    pipeline = job.parallelism.pipeline_model_parallel_size
    most = job.cluster.max_nodes or job.nodes * MOST_NODES
    found: list[tuple[int, Change]] = [
        (job.nodes * factor, {"nodes": job.nodes * factor}) for factor in (2, 4, 8, 16, 32, 64)
    ]
    for stages in range(pipeline + 1, job.model.num_layers + 1):
        nodes, rest = divmod(job.nodes * stages, pipeline)
        if not rest:
            found.append((nodes, {PP: stages, "nodes": nodes}))
    yield from (
        change for nodes, change in sorted(found, key=lambda each: each[0]) if nodes <= most
    )


# on as many nodes, by their cost
STEPS: tuple[Callable[[Job], Iterator[Change]], ...] = (
    _free,
    _selective,
    smaller_micro_batches,
    _full,
    _spread,
    _sharded,
    _split,
)


def cheapest_change(
    job: Job, fits: Callable[[Job], bool], allowed: Callable[[Job], bool]
) -> Change | None:
    """What makes the job fit: the first change of STEPS alone, else several of them together,
    none of which could be left out, else more nodes, else more nodes with all of them. None
    where nothing helps.

    Args:
        fits: whether a job fits its devices.
        allowed: whether it raises no objection that `job` does not.
    """

    def good(changed: Change) -> bool:
        return permitted(changed) and fits(with_change(job, changed))

    def permitted(changed: Change) -> bool:
        return (tried := try_change(job, changed)) is not None and allowed(tried)

    for step in STEPS:
        if alone := next(filter(good, step(job)), None):
            return alone
    together: Change = {}
    for step in STEPS:
        usable = [
            {**together, **change}
            for change in step(with_change(job, together))
            if permitted({**together, **change})
        ]
        if enough := next(filter(good, usable), None):
            return _without_needless(enough, good)
        if usable:
            together = usable[-1]
    for already in ({}, together):
        larger = ({**already, **change} for change in _more_nodes(with_change(job, already)))
        if more := next(filter(good, larger), None):
            return _without_needless(more, good)
    return None


def _without_needless(change: Change, good: Callable[[Change], bool]) -> Change:
    """`change` less what is not needed, the dearest tried first."""
    kept = dict(change)
    for path in reversed(list(change)):
        rest = {key: value for key, value in kept.items() if key != path}
        if rest and good(rest):
            kept = rest
    return kept
