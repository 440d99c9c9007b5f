"""Memory of the ranks, stage by stage, in parts; the fullest rank decides.

n parameters of a rank's stage, d data-parallel size. Published engines (bytes a parameter from
their rules; Rajbhandari et al. 2020, arXiv:1910.02054, section 3; Megatron-LM's distributed
optimizer): weights, gradients from ZeRO 2 on and the optimizer from ZeRO 1 on a d-th, weights
from ZeRO 3 on.

The native trainer: fp32 weights at rest are the optimizer's masters, 4n, a d-th from ZeRO 1 on;
what computes is a gathered copy in 2 or 4 bytes, under ZeRO 3 of two blocks and of what is
around them; gradients accumulate whole in fp32 (on the CPU in fp64) under ZeRO 0 and 1 while
there are several micro-batches, else as fp32 shards. In a pipeline ZeRO 3 shards weights and
moments at rest alone: torch's stages (PipelineStage.backward_maybe_with_nosync) neither free
gathered weights after a backward nor reduce gradients before the last. Experts likewise, but over
the ranks that hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainkit.base.lazy_dataclasses import dataclass, fields
from trainkit.jobs.optimizers import MUON_ROUND
from trainkit.jobs.schema import Job
from trainkit.jobs.table import EngineValue
from trainkit.plan.activations import (
    float8_bytes,
    live_bytes,
    logit_bytes,
    passing_bytes,
    saved_bytes,
    width,
)
from trainkit.plan.layout import Layout
from trainkit.plan.parameter_shapes import (
    Place,
    Unit,
    gathered_at_once,
    is_one_unit,
    largest,
    numbers,
    optimizer_state,
    shard,
    stage_chunks,
)
from trainkit.plan.rules import Rules, StateBytes

# What is neither of the parts: context, communication and matmul workspaces, what the allocator
# cannot use. Assumed; two published runs measured 27 GB where
# the parts are 22.5 GiB (GPT-NeoX-20B on 24 A100-40GB) and 14.3 GiB where they are 9.6 GiB (7.5B on
# V100-16GB, an older trainer with copies of its own).
RESERVE_BYTES = 2**30
RESERVE_PART = 0.1
# On a CPU: interpreter and libraries, and what lies unused between the tensors of malloc's heap
# where several micro-batches come and go; measured (docs/plan.md).
LIBRARY_BYTES = {"warm": 313 * 2**20, "cold": 365 * 2**20}
HEAP_PART = 0.2
TIGHT = 0.9  # of the device: above, what fits may still not run


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one stage (of the tensor- and data-parallel rank that holds most).

    Args:
        stage: the pipeline stage, from 0.
        parameter_bytes: weights at rest, this rank's shard of them.
        gathered_bytes: whole weights to compute with, beside the shards.
        gradient_bytes: gradients.
        optimizer_bytes: moments, and a published engine's master weights.
        activation_bytes: what forward leaves for backward, and the block that is computed again.
        logit_bytes: logits of the last stage and their gradients.
        buffer_bytes: buffers of communication.
        staging_bytes: the copy that a save behind training is written from, and those that outlive
            ranks; in the host's memory, so it is 0 on other devices than the CPU.
        reserve_bytes: assumed, for all the rest; more where a run was measured to take more.
    """

    stage: int
    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logit_bytes: int
    buffer_bytes: int
    staging_bytes: int
    reserve_bytes: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name; they sum to the total."""
        return {
            part.name: getattr(self, part.name) for part in fields(self) if part.name != "stage"
        }

    @property
    def total_bytes(self) -> int:
        """All parts together. The block that is computed again and the logits are not there at
        one time: an upper bound."""
        return sum(self.parts.values())

    @property
    def highest_bytes(self) -> int:
        """The most that is there at one time on the last stage, without what is assumed: when
        what is around the blocks is reduced, activations and logits are gone."""
        passing = max(self.activation_bytes + self.logit_bytes, self.buffer_bytes)
        beside = (self.activation_bytes, self.logit_bytes, self.buffer_bytes, self.reserve_bytes)
        return self.total_bytes - sum(beside) + passing

    def to_json(self) -> dict[str, int]:
        """A stage of plan/1's `memory`."""
        return {"stage": self.stage, "total_bytes": self.total_bytes, **self.parts}


@dataclass(frozen=True)
class Memory:
    """All stages, what the device has (None: unknown), and what published runs took over what is
    planned (None: not known)."""

    stages: tuple[RankMemory, ...]
    device_bytes: int | None
    band: tuple[float, float] | None = None

    @property
    def fullest(self) -> RankMemory:
        """The stage that needs most; the first of equals."""
        return max(self.stages, key=lambda rank: rank.total_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits; None where the device's memory is unknown."""
        if self.device_bytes is None:
            return None
        return self.fullest.total_bytes <= self.device_bytes

    @property
    def tight(self) -> bool:
        """Whether it fits with so little to spare that it may not, since the reserve is assumed."""
        room = self.device_bytes
        return bool(self.fits and room and self.fullest.total_bytes > TIGHT * room)

    @property
    def band_bytes(self) -> tuple[int, int] | None:
        """Between what the fullest rank may be found to take: by published runs; without any, as
        the reserve is nothing or twice what is assumed. None where the device is not known."""
        if self.band is None and self.device_bytes is None:
            return None
        if self.band is None:
            rank = self.fullest
            return rank.total_bytes - rank.reserve_bytes, rank.total_bytes + rank.reserve_bytes
        return (
            round(self.band[0] * self.fullest.total_bytes),
            round(self.band[1] * self.fullest.total_bytes),
        )

    def to_json(self) -> dict[str, object]:
        """plan/1's `memory`."""
        stages = [rank.to_json() for rank in self.stages]
        band = list(self.band_bytes) if self.band_bytes else None
        return {
            "fullest_rank": self.fullest.to_json(),
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "band_bytes": band,
            "stages": stages,
        }


def _fullest(layout: Layout, units: list[Unit]) -> Place:
    """The rank of a stage that holds most of its units."""

    def place(rank: int) -> Place:
        return Place(
            layout.tensor,
            rank % layout.tensor,
            layout.shard,
            layout.expert,
            layout.expert_tensor,
            rank % layout.expert_tensor,
            layout.expert_shard,
        )

    ranks = range(math.lcm(layout.tensor, layout.expert_tensor))
    return max(map(place, reversed(ranks)), key=lambda place: numbers(units, place))


def _native_states(job: Job, layout: Layout, chunks: list[list[Unit]]) -> dict[str, int]:
    zero = job.parallelism.zero_stage
    w = width(job)
    on_cpu = job.cluster.device_type == "cpu"
    reduced = 8 if on_cpu else 4
    units = [unit for chunk in chunks for unit in chunk]
    place = _fullest(layout, units)
    whole = numbers(units, place)
    unit = largest(units, place)
    chunk = max(numbers(chunk, place) for chunk in chunks)
    if layout.expert == 1 and is_one_unit(chunk, layout.data * layout.context):
        unit = chunk  # an expert-parallel rank's experts are reduced over others than the rest
    mine = shard(units, place)
    kept = optimizer_state(units, job.training, lambda weight: weight.shard(place))
    # torch's stages reduce gradients and free gathered weights once a step, whatever zero_stage
    in_rounds = layout.pipeline > 1
    accumulated = reduced * whole if (zero < 2 or in_rounds) and layout.micro_batches > 1 else 0
    # Beside a unit's gradients as they are reduced those that were computed, if they are not added
    # up before. (On a CPU the process keeps their memory.)
    computed = 0 if accumulated and not on_cpu else w
    gathered = w * (gathered_at_once(chunks, place) if zero == 3 and not in_rounds else whole)
    # Gloo copies what it reduces and what it gathers, out of which fully_shard copies again; under
    # ZeRO 3 the next block is gathered while one is reduced.
    copied = (2 if zero == 3 else 1) * (reduced + 2 * w) if on_cpu and layout.shard > 1 else 0
    buffers = [(reduced + computed + copied) * unit, _muon_bytes(job, units, place)]
    if accumulated and not on_cpu:
        # A unit's gradients as they are sent, and as they come. What was gathered is freed first,
        # but where the update writes into it. (Reckoned after peaks of two layers of Llama on one
        # H200, docs/benchmarks.md; not run again.)
        buffers.append(reduced * unit + 4 * -(-unit // layout.shard))
        buffers[-1] -= 0 if _keeps_gathered(job, layout) else gathered
    return {
        "parameter_bytes": 4 * mine,
        "gathered_bytes": gathered,
        "gradient_bytes": max(accumulated, 4 * mine),
        "optimizer_bytes": 4 * kept,
        "buffer_bytes": max(buffers),
    }


def _keeps_gathered(job: Job, layout: Layout) -> bool:
    """Whether weights stay gathered for the update to write them as the model computes with
    them."""
    alone = layout.data == layout.pipeline == 1
    return alone and job.kernels != "reference" and job.training.optimizer == "adam"


def _muon_bytes(job: Job, units: list[Unit], place: Place) -> int:
    """What an update by Muon holds beside its state, in fp32: gradients are reduced by then."""
    matrices = [w for unit in units for w in unit if w.role == "matrix"]
    if job.training.optimizer != "muon" or not matrices:
        return 0
    mine = sum(weight.shard(place) for weight in matrices)
    # experts of other expert-parallel ranks stay there
    largest = max(w.numbers(Place(expert=place.expert)) for w in matrices)
    return 4 * 4 * max(largest, min(mine, MUON_ROUND))


def _states(
    job: Job, layout: Layout, chunks: list[list[Unit]], held: StateBytes, buckets: int
) -> dict[str, int]:
    units = [unit for chunk in chunks for unit in chunk]
    place = Place(layout.tensor)
    n = numbers(units, place)
    moments = optimizer_state(units, job.training, lambda each: each.numbers(place))
    zero = job.parallelism.zero_stage

    def kept(size: int, from_stage: int) -> int:
        return size * -(-n // (layout.data_context if zero >= from_stage else 1))

    return {
        "parameter_bytes": kept(held.weights, 3),
        "gathered_bytes": held.weights * gathered_at_once(chunks, place) if zero == 3 else 0,
        "gradient_bytes": kept(held.gradients, 2),
        "optimizer_bytes": kept(held.master, 1) + held.moment * kept(1, 1) * moments // max(1, n),
        "buffer_bytes": width(job) * buckets,
    }


def _buckets(rules: Rules, arguments: Mapping[str, EngineValue]) -> int:
    """Elements of the reduction's buffer: the engine's own, or what engine_args says."""
    zero = arguments.get("zero_optimization")
    given = zero.get("reduce_bucket_size") if isinstance(zero, Mapping) else None
    return int(given) if isinstance(given, int | float) else rules.bucket_elements


def stage_memory(
    job: Job,
    layout: Layout,
    rules: Rules,
    vocab_size: int,
    padded: int,
    stage: int,
    excess: float = 1.0,
) -> RankMemory:
    """Memory of a rank of `stage`.

    Args:
        vocab_size: rows of embedding and head.
        padded: columns of the head's product.
        excess: how many times as much a run took as is planned without it.
    """
    last = stage == layout.last_stage
    chunks = stage_chunks(job.model, rules.vocab_rows(vocab_size, padded), layout, stage)
    if rules.states is None:
        parts = _native_states(job, layout, chunks)
    else:
        parts = _states(
            job,
            layout,
            chunks,
            rules.states[job.training.precision],
            _buckets(rules, job.engine_args),
        )
    parts["activation_bytes"] = (
        saved_bytes(job, layout, rules, stage)
        + live_bytes(job, layout, rules)
        + passing_bytes(job, layout)
        + float8_bytes(job, layout)
    )
    if last:
        parts["logit_bytes"] = logit_bytes(job, layout, rules, vocab_size, padded)
    else:
        parts["logit_bytes"] = 0
    on_cpu = job.cluster.device_type == "cpu"
    unused = (HEAP_PART if layout.micro_batches > 1 else 0) if on_cpu else RESERVE_PART
    reserve = float(LIBRARY_BYTES[job.recovery] if on_cpu else RESERVE_BYTES)
    reserve += unused * sum(parts.values())
    copies = copies_of_state(job, rules) if on_cpu else 0
    parts["staging_bytes"] = copies * (parts["parameter_bytes"] + parts["optimizer_bytes"])
    reserve += (excess - 1) * (sum(parts.values()) + reserve)
    return RankMemory(stage=stage, reserve_bytes=round(reserve), **parts)


def copies_of_state(job: Job, rules: Rules) -> int:
    """How often a rank's weights and moments are in the host's memory beside themselves: what a
    save behind training writes, two copies that outlive the rank, two of a rank of another host."""
    if rules.states is not None:
        return 0
    copies = 4 if job.nodes > 1 else 2
    return job.checkpoint.save_async + copies * (job.checkpoint.memory_interval is not None)


def memory_of(
    job: Job, layout: Layout, rules: Rules, vocab_size: int, padded: int, excess: float = 1.0
) -> Memory:
    """Memory of every stage."""
    stages = tuple(
        stage_memory(job, layout, rules, vocab_size, padded, stage, excess)
        for stage in range(layout.pipeline)
    )
    return Memory(stages, job.cluster.device.memory_bytes, rules.memory_band)


def fits(
    job: Job, layout: Layout, rules: Rules, vocab_size: int, padded: int, excess: float = 1.0
) -> bool:
    """Whether every stage fits the device as far as its memory is known: `Memory.fits` that ends
    at the first that does not."""
    room = job.cluster.device.memory_bytes
    return room is None or all(
        stage_memory(job, layout, rules, vocab_size, padded, stage, excess).total_bytes <= room
        for stage in range(layout.pipeline)
    )
