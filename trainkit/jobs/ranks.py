"""Which rank does what: one pure order of ranks, and how widths that need not divide are shared
over tensor-parallel ranks."""

from __future__ import annotations

import math

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.models import Model
from trainkit.jobs.schema import Job

UNITS = (64, 32, 16, 8, 1)  # rows a share is a multiple of: kernels like whole tiles
UNEVEN = 1.05  # times the mean that the largest share may have for it: all wait for that one


@dataclass(frozen=True)
class ParallelDegrees:
    """How many ranks lie along each axis.

    Args:
        tensor, pipeline: model-parallel sizes.
        replicate: whole copies that data- and context-parallel ranks hold together (HSDP's outer
            axis).
        shard: ranks that one copy is sharded over.
        expert: ranks that the experts of a layer lie on.
        expert_tensor: ranks that one expert is split over.
        context: ranks that the tokens of a sample are dealt to. They hold the same weights, so
            these are sharded over them too: `replicate * shard` ranks are data- and
            context-parallel ones together.
    """

    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1

    @property
    def data_context(self) -> int:
        """Ranks of a stage that hold the same weights together."""
        return self.replicate * self.shard

    @property
    def data(self) -> int:
        """Data-parallel size: of ranks that read samples of their own."""
        return self.data_context // self.context

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pipeline * self.data_context * self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts of a layer together: neighbours in the order of ranks, with
        those of one expert beside one another (Megatron-LM, core/parallel_state.py)."""
        return self.expert * self.expert_tensor

    @property
    def together(self) -> int:
        """Ranks of a stage that compute a micro-batch each or one together, and need no other for
        it: neighbours in the order of ranks."""
        return math.lcm(self.tensor * self.context, self.expert_ranks)

    @property
    def expert_copies(self) -> tuple[int, int]:
        """(replicate, shard) of experts: the ranks of a stage that hold the same experts are laid
        out as those that hold the same layers."""
        data = max(1, self.data_context * self.tensor // self.expert_ranks)
        replicate = data if self.replicate == self.data_context > 1 else self.replicate
        return replicate, max(1, data // replicate)


@dataclass(frozen=True)
class RankCoordinates:
    """Where a rank stands on each axis, from 0."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int

    def data(self, degrees: ParallelDegrees) -> int:
        """The data-parallel rank: neighbours in it share a copy of the model."""
        return (self.replicate * degrees.shard + self.shard) // degrees.context

    def context(self, degrees: ParallelDegrees) -> int:
        """The context-parallel rank: neighbours in it read the same samples."""
        return (self.replicate * degrees.shard + self.shard) % degrees.context


def degrees_of(job: Job) -> ParallelDegrees:
    """The degrees a job asks for; ZeRO 0 is a whole copy on every data-parallel rank. Where they
    do not divide the world, of the ranks that fit in."""
    p = job.parallelism
    ranks = job.data_parallel_size * p.context_parallel_size
    replicate = ranks if p.zero_stage == 0 else p.data_parallel_replicate_size
    return ParallelDegrees(
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        replicate,
        max(1, ranks // replicate),
        p.expert_model_parallel_size,
        (p.expert_tensor_parallel_size or p.tensor_model_parallel_size) if job.model.moe else 1,
        p.context_parallel_size,
    )


def rank_at(place: RankCoordinates, degrees: ParallelDegrees) -> int:
    """rank = ((pp * DP + dp) * CP + cp) * TP + tp: tensor-parallel neighbours are neighbours, then
    context-parallel ones, and stages lie far apart (Megatron-LM's order tp-cp-ep-dp-pp)."""
    among = place.replicate * degrees.shard + place.shard
    return (place.pipeline * degrees.data_context + among) * degrees.tensor + place.tensor


def coordinates_of(rank: int, degrees: ParallelDegrees) -> RankCoordinates:
    """The inverse of `rank_at`."""
    rest, tensor = divmod(rank, degrees.tensor)
    pipeline, among = divmod(rest, degrees.data_context)
    return RankCoordinates(pipeline, *divmod(among, degrees.shard), tensor)


def share_of_rank(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` of `size` rows: whole multiples of the largest of UNITS
    that leaves them about equal; nothing is padded."""
    fits = (
        unit
        for unit in UNITS
        if size >= unit * parts and unit * -(-size // (unit * parts)) * parts <= UNEVEN * size
    )
    unit = next(fits, 1)
    units = -(-size // unit)
    start, end = (min(size, units * i // parts * unit) for i in (index, index + 1))
    return start, end - start


def key_value_heads(model: Model, tensor: int, index: int) -> tuple[int, int]:
    """(first, count) of the key-value heads on tensor-parallel rank `index`: its share of them,
    or, where there are fewer than ranks, the one that its query heads read, which tensor /
    query_groups ranks hold alike."""
    groups = model.query_groups
    if groups < tensor:
        return (index * groups // tensor, 1)
    return (index * (groups // tensor), groups // tensor)
