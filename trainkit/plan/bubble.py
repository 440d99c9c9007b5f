"""A pipeline that waits much, and what would let it wait less at the same number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.jobs.schema import Job
from trainkit.plan.checks import SCHEDULE, VIRTUAL
from trainkit.plan.duration import Duration
from trainkit.plan.layout import layout_of
from trainkit.plan.limits import Sizes
from trainkit.plan.objection import Change, Objection, try_change
from trainkit.plan.suggestions import smaller_micro_batches

LARGE = 0.15  # of a step: below, a bubble is not worth a word
LESS = 0.75  # a change that leaves more of the bubble is not worth a word


def _interleaved(job: Job) -> Iterator[Change]:
    """More chunks of each stage, the most first: the bubble gets shorter, transfers more."""
    parallelism = job.parallelism
    layers = job.model.num_layers
    now = parallelism.virtual_pipeline_model_parallel_size or 1
    for virtual in range(layers // parallelism.pipeline_model_parallel_size, now, -1):
        yield {VIRTUAL: virtual, SCHEDULE: "1f1b"} if now > 1 else {VIRTUAL: virtual}


def _zero_bubble(job: Job) -> Iterator[Change]:
    if job.parallelism.virtual_pipeline_model_parallel_size is None:
        yield {SCHEDULE: "zbv"}


def _smaller(job: Job) -> Iterator[Change]:
    """More micro-batches, the smallest first, of the same global batch."""
    yield from reversed(list(smaller_micro_batches(job)))


def bubble_notes(job: Job, sizes: Sizes, duration: Duration | None) -> Iterator[Objection]:
    """A note where a large part of each step is bubble and another layout would cut it: that with
    the shortest, of those that fit and raise no other objection."""
    now = layout_of(job).bubble_fraction
    if now < LARGE:
        return
    raised = sizes.codes(job)
    best = LESS * now
    found = None
    for kind in (_interleaved, _zero_bubble, _smaller):
        for change in kind(job):
            tried = try_change(job, change)
            if tried is None or not sizes.codes(tried) <= raised or not sizes.fits(tried):
                continue
            if (bubble := layout_of(tried).bubble_fraction) < best:
                best = bubble
                found = change
            break  # the first of a kind that can be is its best
    message = f"{now:.1%} of each step is pipeline bubble"
    if found is None:
        more = "only more micro-batches a step (training.global_batch_size) would cut it"
        yield Objection(
            "large-bubble", "parallelism.pipeline_model_parallel_size", f"{message}; {more}"
        )
        return
    words = " with ".join(f"{path} = {value}" for path, value in found.items())
    message += f"; {words} leaves {best:.1%}"
    if duration is not None:
        days = duration.parts.steps / 86400
        message += f": {days * (1 - now) / (1 - best):,.1f} days of steps instead of {days:,.1f}"
    yield Objection("large-bubble", next(iter(found)), message, (found,))
