"""A step's time, term by term."""

from __future__ import annotations

import functools
import math
from collections import Counter

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.plan.time.layer import CPU, HALF, OLD, Work, block, head, pace_of, parameters_of_rank
from trainkit.plan.time.network import Links, links_of
from trainkit.plan.time.setup import RankSplit, Setup

UPDATE_BYTES = 14  # a parameter: master read and written, gradient, weight
MOMENT_BYTES = 8  # a parameter and moment: read and written
OWN = ("fsdp", "host")  # trainers that sum gradients in every micro-batch under ZeRO 2
GLOO_SCATTER = 2  # all-gathers that a reduce-scatter takes: it reduces everywhere
ADDED_BYTES = 10  # a parameter and micro-batch, as two-byte numbers: fp64 sums on a CPU
FUSED_BACKWARD = 2.5  # of attention that computes its scores again, over its forward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `terms` sum to it."""

    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.terms.values())


def stage_layers(setup: Setup) -> tuple[float, float]:
    """Layers of the fullest stage and of the one with the head. Where layers do not divide,
    Megatron-LM counts embedding and head as one each."""
    split, layers = setup.split, setup.shape.layers
    if split.stage_layers:
        return split.stage_layers, split.last_layers
    if layers % split.pipeline and (layers + 2) % split.pipeline == 0:
        full = (layers + 2) // split.pipeline
        return full, full - 1
    return math.ceil(layers / split.pipeline), layers // split.pipeline


def _tensor_sums(setup: Setup, links: Links, fitted: dict[str, float]) -> float:
    """Of one block's forward: two all-reduces, or as many pairs of all-gather and reduce-scatter
    of the same bytes."""
    shape, split = setup.shape, setup.split
    size = HALF * split.micro_batch * shape.seq / split.context * shape.hidden
    time = 2 * links.all_reduce(size, split.tensor, 1)
    if split.sequence and setup.machine.generation == CPU:  # gather and scatter, by gloo
        time *= (1 + GLOO_SCATTER) / 2
    return time * (1 - fitted[f"hidden_tensor.{setup.software}"])


def _exchanges(setup: Setup, links: Links, fitted: dict[str, float]) -> tuple[float, float]:
    """Of one block's forward: experts' tokens there and back; keys and values of other parts of
    the sequence, beyond what attention hides."""
    shape, split = setup.shape, setup.split
    tokens = split.micro_batch * shape.seq / split.context
    experts = context = 0.0
    if shape.experts:
        size = HALF * tokens * shape.topk * shape.hidden / split.tensor
        size *= split.expert_tensor or 1  # a row goes to all ranks of its expert
        sent = links.exchange(size, *split.expert_group)
        experts = 2 * sent * fitted["exchange"] * (1 - shape.dense)
    if split.context > 1 and split.exchanges:  # queries, keys, values, and the result back
        width = 2 * (shape.query + shape.key)
        size = HALF * tokens * width / split.tensor
        context = links.exchange(size, split.context, split.tensor) * fitted["context"]
    elif split.context > 1:
        size = HALF * split.micro_batch * shape.seq * 2 * shape.key / split.tensor
        context = links.gather(size, split.context, split.tensor) * fitted["context"]
    return experts, context


def _sharded(setup: Setup, links: Links, layers: float) -> float:
    """Under ZeRO 3, in each micro-batch: weights gathered for forward and for backward, gradients
    scattered. Under ZeRO 2 these alone, where no pipeline keeps them whole."""
    split = setup.split
    if split.shard <= 1 or not (split.zero == 3 or _scatters(setup)):
        return 0.0
    dense, experts = parameters_of_rank(setup.shape, setup, layers)
    scatters = GLOO_SCATTER if setup.machine.generation == CPU else 1
    times = scatters + 2 * (split.zero == 3)
    if split.expert_shard is None:
        size = HALF * (dense + experts)
        return times * links.gather(size, split.shard, split.tensor, messages=layers)
    time = links.gather(HALF * dense, split.shard, split.tensor, messages=layers)
    _, stride = split.expert_copies
    time += links.gather(HALF * experts, split.expert_shard, stride, messages=layers)
    return times * time


def _scatters(setup: Setup) -> bool:
    """Gradients are a shard between micro-batches."""
    split = setup.split
    return split.zero == 2 and split.pipeline == 1 and setup.software in OWN


def _data_sums(setup: Setup, links: Links, fitted: dict[str, float], layers: float) -> float:
    """Once a step: gradients summed over data-parallel ranks, and under ZeRO 1 and 2 the new
    weights gathered."""
    split = setup.split
    ranks = split.data * split.context
    dense, experts = parameters_of_rank(setup.shape, setup, layers)
    time = 0.0
    if split.zero < 3:
        size = HALF * dense
        messages = size / fitted["bucket"]
        if not split.zero:
            time += links.all_reduce(size, ranks, split.tensor)
        else:
            sent = split.shard * fitted["parts"] if setup.parts else messages
            time += links.gather(size, split.shard, split.tensor, sent)
            if not _scatters(setup):
                time += links.gather(size, split.shard, split.tensor, messages)
            copies = ranks // split.shard
            time += links.all_reduce(size / split.shard, copies, split.tensor * split.shard)
        time += links.all_reduce(HALF * experts, *split.expert_copies)
    elif split.shard < ranks:
        copies = ranks // split.shard
        size = HALF * (dense + experts) / split.shard
        time += links.all_reduce(size, copies, split.tensor * split.shard)
    return time


def _passes(setup: Setup, work: Work, messages: float) -> dict[str, float]:
    """Of one block and one micro-batch: forward and backward, by term; recomputation apart.

    Args:
        setup: what is computed where.
        work: of a forward pass.
        messages: seconds of tensor parallelism, which the host starts as well.
    """
    split = setup.split
    fused = setup.software != "megatron-2021"
    backward = FUSED_BACKWARD if fused else 2.0
    again = {"full": split.recomputed}.get(split.recompute, 0.0)
    once = work.products + work.attention + work.memory
    redone = again * once
    if split.recompute == "selective":  # attention, or where that is fused, what memory bounds
        redone = work.memory / 2 if fused else work.attention
    return {
        "products": 3 * work.products,
        "attention": (1 + backward) * work.attention,
        "memory": 3 * work.memory,
        "recomputation": redone,
        "launches": work.waits(3 + again, messages),
    }


def step_time(setup: Setup, fitted: dict[str, float]) -> StepTime:
    """Seconds of one step, by term.

    The slowest stage does `m` micro-batches one after the other, and waits once for the p - 1
    others: for a micro-batch of each, a v-th with v chunks, or as ZB-V has it (plan/layout.py).
    """
    shape, split = setup.shape, setup.split
    pace = pace_of(setup.machine, setup.software, fitted)
    links = links_of(setup.machine, split.world, fitted)
    full, last = stage_layers(setup)
    work = block(setup, pace, fitted)
    again = split.recomputed if split.recompute == "full" else 0.0
    sums = (2 + again) * _tensor_sums(setup, links, fitted)
    experts, context = _exchanges(setup, links, fitted)
    per_layer = _passes(setup, work, sums) | {
        "tensor-parallel": sums,
        "experts": (2 + again) * experts,
        "context": (2 + again) * context,
    }
    terms = {name: full * seconds for name, seconds in per_layer.items()}
    layer = sum(per_layer.values())
    top = head(setup, pace, fitted)
    with_head = max(0.0, top - (full - last) * layer)  # beyond what the fullest stage takes
    terms["head"] = with_head
    busy = full * layer + with_head
    terms["sharding"] = _beyond(_sharded(setup, links, full), busy, fitted, setup.software)
    terms["pipeline"] = _transfers(setup, links, fitted)
    micro_batches = split.micro_batches
    others = max(0.0, shape.layers * layer + top - busy)
    bubble = _bubble(split, others, terms["sharding"] + terms["pipeline"])
    terms = {name: micro_batches * seconds for name, seconds in terms.items()}
    terms["bubble"] = bubble
    if setup.machine.crowd > 1:  # cores that a rank waits on compute for the others
        busy_stage = sum(terms.values()) - bubble
        terms["bubble"] = max(0.0, (busy_stage + bubble) / setup.machine.crowd - busy_stage)
    hidden_by = busy * 0.6
    terms["data-parallel"] = _beyond(
        _data_sums(setup, links, fitted, full), hidden_by, fitted, setup.software
    )
    dense, of_experts = parameters_of_rank(shape, setup, full)
    whole = dense + of_experts
    sharded = split.shard if split.expert_shard is None else split.expert_shard
    held = dense / max(1, split.shard) + of_experts / max(1, sharded)
    moved = UPDATE_BYTES + MOMENT_BYTES * split.moments
    terms["optimizer"] = moved * held / pace.memory + fitted[f"fixed.{setup.software}"]
    if split.update_flops:  # of whole matrices: to their owners, and back
        terms["optimizer"] += split.update_flops / pace.products
        terms["optimizer"] += 2 * links.exchange(4 * held, split.shard, split.tensor)
    if setup.machine.generation == CPU:
        terms["optimizer"] += ADDED_BYTES * whole * micro_batches / pace.memory
    nodes = max(1.0, split.world / setup.machine.per_node)
    total = sum(terms.values())
    terms["stragglers"] = total * fitted["stragglers"] * math.log2(nodes)
    return StepTime(terms)


def _beyond(time: float, busy: float, fitted: dict[str, float], software: str) -> float:
    """What of a transfer is not hidden behind computing that takes `busy`."""
    hidden = fitted[f"hidden_data.{software}"]
    return time * (1 - hidden) + hidden * max(0.0, time - busy)


def _transfers(setup: Setup, links: Links, fitted: dict[str, float]) -> float:
    """Between stages, of one micro-batch and every chunk: what the stage waits for that has the
    slowest neighbours, forward and backward.

    Megatron-LM sends a share from each tensor-parallel rank, DeepSpeed's pipeline the whole. Ranks
    are numbered tensor, context, data, pipeline: a stage is a row of ranks, and its neighbours
    may or may not be in the same domain.
    """
    shape, split = setup.shape, setup.split
    if split.pipeline == 1:
        return 0.0
    size = HALF * split.micro_batch * shape.seq / split.context * shape.hidden
    if setup.software != OLD:
        size /= split.tensor
    width = split.tensor * split.context * split.data
    shares = crossing_shares(split.pipeline, width, links.domain)
    edges = [links.send_far(size, share) if share else links.send(size) for share in shares]
    worst = max(edges)
    if setup.software == OLD:  # one after the other
        pairs = zip([0.0, *edges], [*edges, 0.0], strict=True)
        worst = max(before + after for before, after in pairs)
    return 2 * split.virtual * worst * (1 - fitted[f"hidden_pipeline.{setup.software}"])


@functools.cache
def crossing_shares(stages: int, width: int, domain: int) -> tuple[float, ...]:
    """Of each border between stages of `width` ranks: the part of a domain's ranks that send to
    another domain, which share its network. 0: none."""
    if width >= domain:
        return (1.0,) * (stages - 1)
    shares = []
    for stage in range(stages - 1):
        first = stage * width
        from_domain = Counter(
            rank // domain
            for rank in range(first, first + width)
            if rank // domain != (rank + width) // domain
        )
        shares.append(max(from_domain.values(), default=0) / domain)
    return tuple(shares)


def _bubble(split: RankSplit, others: float, moved: float) -> float:
    """Waiting for the other stages.

    Args:
        split: the schedule.
        others: seconds of a micro-batch in all stages but the slowest.
        moved: of what each stage waits for besides computing.
    """
    waiting = others + (split.pipeline - 1) * moved
    return waiting / 6 if split.zero_bubble else waiting / split.virtual
