"""What is wrong with a job before anything runs, all at once. Each check yields objections with
changes that may remove them; `planner` keeps those that do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainkit.jobs.schema import Job, Model
from trainkit.plan.batch import batch_sizes
from trainkit.plan.grid_checks import (
    CP,
    REPLICAS,
    context_objections,
    contexts,
    expert_objections,
    replay_objections,
)
from trainkit.plan.layout import Layout, layout_of, nearest
from trainkit.plan.objection import Change, Objection
from trainkit.plan.rules import Rules
from trainkit.plan.split import EMBEDDING, LOSS, split_of

MANY = 4  # batch sizes named in one message
ENDS_COUNTED: Change = {f"engine_args.{EMBEDDING}": True, f"engine_args.{LOSS}": True}
TP = "parallelism.tensor_model_parallel_size"
PP = "parallelism.pipeline_model_parallel_size"
VIRTUAL = "parallelism.virtual_pipeline_model_parallel_size"
ZERO = "parallelism.zero_stage"
BATCH = "training.global_batch_size"
SCHEDULE = "parallelism.pipeline_schedule"


def checks(job: Job, rules: Rules, tokenizer_size: int | None) -> Iterator[Objection]:
    """Everything but memory and disk.

    Args:
        rules: of the job's engine.
        tokenizer_size: ids of the prepared tokenizer; None: not prepared.
    """
    yield from _nodes(job)
    yield from layout_objections(job, rules)
    yield from _family(job, rules)
    yield from _vocabulary(job, tokenizer_size)
    yield from _devices(job)
    yield from _precision(job)
    yield from _profile(job)


def layout_objections(job: Job, rules: Rules) -> Iterator[Objection]:
    """Why the ranks cannot share the work. The trainer's ranks ask it too, before their first
    step.

    Args:
        job: the job.
        rules: of its engine.
    """
    layout = layout_of(job)
    yield from _world(job, layout)
    yield from _tensor(job, layout, rules)
    yield from context_objections(job, layout)
    yield from _stages(job, layout, rules)
    yield from _schedule(job, layout, rules)
    yield from _zero(job, layout, rules)
    yield from _replicas(job, layout, rules)
    yield from expert_objections(job, layout)
    yield from replay_objections(job)
    yield from rules.objections(job)
    yield from _batches(job)


def _world(job: Job, layout: Layout) -> Iterator[Objection]:
    """The degrees divide the world."""
    rest = job.parallelism.ranks_of_a_sample
    context = f" x context-parallel {layout.context}" if layout.context > 1 else ""
    most = job.cluster.max_nodes
    if layout.world % rest:
        there = (
            f"{job.nodes} node{'s' if job.nodes > 1 else ''} of {layout.ranks_per_node} ranks are"
            f" {layout.world}"
        )
        message = (
            f"{there}, which tensor-parallel {layout.tensor}{context} x pipeline-parallel"
            f" {layout.pipeline} = {rest} does not divide"
        )
        step = rest // math.gcd(rest, layout.ranks_per_node)
        nodes = nearest(
            job.nodes, lambda n: n % step == 0, most=most if most is not None else job.nodes + step
        )
        others = rest // layout.pipeline
        pipelines = nearest(layout.pipeline, lambda p: layout.world % (others * p) == 0)
        yield Objection(
            "world-not-divisible",
            "nodes",
            message,
            (
                *({"nodes": n} for n in nodes),
                *({PP: p} for p in pipelines),
                *({CP: n} for n in contexts(job, layout)),
            ),
        )


def _nodes(job: Job) -> Iterator[Objection]:
    """The cluster has as many nodes; launcher = "local" is one machine."""
    most = job.cluster.max_nodes
    if most is not None and job.nodes > most:
        yield Objection(
            "too-many-nodes",
            "nodes",
            f"{job.nodes} nodes, but cluster {job.cluster.name} has {most} (cluster.max_nodes)",
            ({"nodes": most},),
        )
    if job.nodes > 1 and job.cluster.launcher_traits.one_machine:
        message = (
            f"{job.nodes} nodes, but launcher = 'local' of cluster {job.cluster.name} starts ranks"
            " on one machine only; use launcher = 'ssh', 'pdsh', 'slurm' or 'kubernetes'"
        )
        yield Objection("local-is-one-node", "nodes", message, ({"nodes": 1},))


def indivisible(model: Model, rules: Rules, tensor: int) -> dict[str, tuple[str, int]]:
    """What tensor parallelism of this size cannot split: code, key and size of each."""
    heads = model.num_attention_heads
    groups = model.query_groups
    found = {}
    if heads % tensor:
        found["heads-not-divisible"] = ("num_attention_heads", heads)
    elif groups % tensor and not (rules.repeats_groups and tensor % groups == 0):
        found["query-groups-not-divisible"] = ("num_query_groups", groups)
    for key, width in _mlp_widths(model).items():
        if width % tensor and not (rules.uneven_shares and width >= tensor):
            found["mlp-not-divisible"] = (key, width)
    if model.vocab_size is not None and model.vocab_size < tensor:
        found["vocabulary-not-divisible"] = ("vocab_size", model.vocab_size)
    return found


def _mlp_widths(model: Model) -> dict[str, int]:
    """Of the MLPs that all tokens take, by their keys."""
    found = {}
    if not model.sparse(0):
        found["ffn_hidden_size"] = model.ffn_width
    if model.moe and model.moe.shared_expert_intermediate_size:
        found["shared_expert_intermediate_size"] = model.moe.shared_expert_intermediate_size
    return found


def _tensor(job: Job, layout: Layout, rules: Rules) -> Iterator[Objection]:
    """Tensor parallelism stays in a node, and divides what it splits."""
    t = layout.tensor
    model = job.model
    fitting = [
        n
        for n in range(1, layout.ranks_per_node + 1)
        if layout.ranks_per_node % n == 0 and not indivisible(model, rules, n)
    ]
    changes: tuple[Change, ...] = tuple({TP: n} for n in nearest(t, lambda n: n in fitting))
    if layout.ranks_per_node % t and job.nodes > 1:
        message = (
            f"tensor-parallel groups of {t} would reach across nodes of {layout.ranks_per_node}"
            " ranks: every layer would wait for the network"
        )
        yield Objection("tensor-parallel-across-nodes", TP, message, changes)
    for code, (name, size) in indivisible(model, rules, t).items():
        yield Objection(
            code, TP, f"{name} {size} does not divide by tensor-parallel size {t}", changes
        )
    if model.seq_length % t and (layout.sequence or model.moe):
        yield _sequence(model, t, fitting)


def _sequence(model: Model, tensor: int, fitting: list[int]) -> Objection:
    """Tensor-parallel ranks that cannot share a sample's tokens equally.

    Args:
        fitting: sizes that divide what else tensor parallelism splits.
    """
    message = f"seq_length {model.seq_length} does not divide by tensor-parallel size {tensor}"
    if model.moe:
        equal = nearest(tensor, lambda n: model.seq_length % n == 0 and n in fitting)
        return Objection(
            "sequence-not-divisible",
            TP,
            f"{message}, whose ranks route a part of each sample",
            tuple({TP: n} for n in equal),
        )
    return Objection(
        "sequence-not-divisible",
        "parallelism.sequence_parallel",
        f"sequence_parallel: {message}",
        ({"parallelism.sequence_parallel": False},),
    )


def _pipeline_change(layout: Layout, pipeline: int) -> Change:
    """Another number of stages, with the number of nodes that then keeps the data-parallel size,
    where the present one would not divide."""
    ranks = layout.tensor * layout.context * pipeline
    if layout.world % ranks == 0:
        return {PP: pipeline}
    step = ranks // math.gcd(ranks, layout.ranks_per_node)
    return {
        PP: pipeline,
        "nodes": max(1, round(ranks * layout.data / layout.ranks_per_node / step)) * step,
    }


def _stages(job: Job, layout: Layout, rules: Rules) -> Iterator[Objection]:
    """Every chunk of a pipeline has layers, equally many where the engine wants that."""
    layers = job.model.num_layers
    parts = len(layout.chunks)
    v = parts // layout.pipeline
    chunks = f"{layout.pipeline} pipeline stages" + (f" of {v} chunks" if v > 1 else "")
    split = split_of(job, layout.pipeline, v)
    if split.problem:
        yield Objection("pipeline-layout", f"engine_args.{split.key}", split.problem)
    if split.key:
        return
    if parts > layers:
        fewer = nearest(
            layout.pipeline,
            lambda p: p * v <= layers and (rules.uneven_stages or layers % (p * v) == 0),
        )
        changes = tuple(_pipeline_change(layout, p) for p in fewer)
        yield Objection("more-stages-than-layers", PP, f"{layers} layers for {chunks}", changes)
    elif layers % parts and not rules.uneven_stages:
        whole = [
            _pipeline_change(layout, p)
            for p in nearest(layout.pipeline, lambda p: layers % (p * v) == 0)
        ]
        deeper: list[Change] = [
            {"model.num_layers": n} for n in (layers // parts * parts, -(-layers // parts) * parts)
        ]
        message = f"{layers} layers do not divide over {chunks}, as {rules.engine} wants it"
        fits = rules.counts_ends and (layers + 2) % parts == 0
        counted = [ENDS_COUNTED] if fits else []
        yield Objection("layers-not-divisible", PP, message, (*counted, *whole, *deeper))


def _schedule(job: Job, layout: Layout, rules: Rules) -> Iterator[Objection]:
    """A schedule that the engine has; an interleaved one over a whole number of rounds, in every
    batch that a step may have."""
    stages = layout.pipeline
    quantum = job.training.micro_batch_size * layout.data
    if layout.v_shaped and not rules.zero_bubble:
        yield Objection(
            "no-zero-bubble",
            SCHEDULE,
            f"engine {rules.engine} has no zero-bubble schedule",
            ({SCHEDULE: "1f1b"},),
        )
        return
    if layout.virtual > 1 and not rules.virtual_stages:
        yield Objection(
            "no-virtual-stages",
            VIRTUAL,
            f"engine {rules.engine} has no interleaved schedule; remove"
            " virtual_pipeline_model_parallel_size",
        )
        return

    if layout.virtual == 1:
        return

    def fits(micro_batches: int) -> bool:
        return (
            micro_batches % (stages if rules.whole_rounds else max(1, micro_batches // stages)) == 0
        )

    sizes = [size for size in batch_sizes(job) if size % quantum == 0 and not fits(size // quantum)]
    if not sizes:
        return
    if rules.whole_rounds:
        demand = f"micro-batches in multiples of {stages} stages"
    else:
        demand = f"equally many micro-batches in every round of {stages} or more"
    message = (
        f"an interleaved schedule needs {demand}; a step has"
        f" {', '.join(str(size // quantum) for size in sizes[:MANY])}"
    )
    if sizes[-1] != job.global_batch_size:
        yield Objection(
            "micro-batches-not-divisible",
            "training.rampup_batch_size",
            f"{message} while the batch grows",
        )
        return
    wanted = nearest(
        sizes[-1],
        lambda b: b % quantum == 0 and fits(b // quantum),
        most=sizes[-1] + quantum * stages,
    )
    yield Objection(
        "micro-batches-not-divisible", BATCH, message, tuple({BATCH: b} for b in wanted)
    )


def _zero(job: Job, layout: Layout, rules: Rules) -> Iterator[Objection]:
    """A stage of ZeRO that the engine has."""
    asked = job.parallelism.zero_stage
    piped = layout.pipeline > 1
    if layout.v_shaped:
        known = rules.zero_in_bubble
    elif piped:
        known = rules.zero_in_pipeline
    else:
        known = rules.zero_stages
    if asked not in known:
        if asked not in rules.zero_stages:
            under = ""
        elif layout.v_shaped:
            under = " under a zero-bubble pipeline"
        else:
            under = " under a pipeline"
        message = f"engine {rules.engine} has no ZeRO stage {asked}{under}"
        yield Objection(
            "no-such-zero-stage",
            ZERO,
            message,
            tuple({ZERO: stage} for stage in reversed(known) if stage < asked)[:1],
        )


def _replicas(job: Job, layout: Layout, rules: Rules) -> Iterator[Objection]:
    """HSDP: whole copies divide the data-parallel ranks."""
    asked = job.parallelism.data_parallel_replicate_size
    if asked > 1 and not rules.replicates:
        yield Objection(
            "no-replicas",
            REPLICAS,
            f"engine {rules.engine} shards over all data-parallel ranks only",
            ({REPLICAS: 1},),
        )
    elif layout.data % asked:
        message = (
            f"data_parallel_replicate_size {asked} does not divide data-parallel size {layout.data}"
        )
        yield Objection(
            "replicas-not-divisible",
            REPLICAS,
            message,
            tuple({REPLICAS: n} for n in nearest(asked, lambda n: layout.data % n == 0)),
        )


def _batches(job: Job) -> Iterator[Objection]:
    """Every batch that a step may have must divide; of a ramp each size that does not is named."""
    micro = job.training.micro_batch_size
    dp = job.data_parallel_size
    quantum = micro * dp
    product = f"micro_batch_size {micro} x data-parallel size {dp}"
    *growing, whole = batch_sizes(job)
    if whole % quantum:
        below = whole // quantum * quantum
        changes = tuple({BATCH: b} for b in (below, below + quantum) if b)
        yield Objection(
            "batch-not-divisible",
            BATCH,
            f"global_batch_size {whole} does not divide by {product}",
            changes,
        )
    if wrong := [size for size in growing if size % quantum]:
        sizes = ", ".join(map(str, wrong[:MANY])) + (
            f" and {len(wrong) - MANY} more" if len(wrong) > MANY else ""
        )
        message = (
            f"rampup_batch_size passes through {sizes}, which {product} does not divide; start and"
            f" increment must be multiples of {quantum}"
        )
        yield Objection("ramp-not-divisible", "training.rampup_batch_size", message)


def _family(job: Job, rules: Rules) -> Iterator[Objection]:
    """A family of models that the engine has."""
    if rules.families is not None and job.model.family not in rules.families:
        message = (
            f"engine {rules.engine} has no models of family {job.model.family!r}, only"
            f" {', '.join(rules.families)}"
        )
        yield Objection("no-such-family", "model.family", message)


def _vocabulary(job: Job, tokenizer_size: int | None) -> Iterator[Objection]:
    rows = job.model.vocab_size
    if rows and tokenizer_size and tokenizer_size > rows:
        message = f"the tokenizer has {tokenizer_size} ids, model {job.model.name!r} only {rows}"
        yield Objection(
            "vocabulary-too-small",
            "model.vocab_size",
            message,
            ({"model.vocab_size": tokenizer_size},),
        )


def _devices(job: Job) -> Iterator[Objection]:
    kind = job.cluster.device_type
    there = job.cluster.gpus_per_node
    if kind != "cpu" and job.ranks_per_node > there:
        what = "GPUs" if kind == "cuda" else "devices"
        message = f"{job.ranks_per_node} ranks a node for {there} {what} (cluster.gpus_per_node)"
        yield Objection(
            "more-ranks-than-gpus",
            "cluster.ranks_per_node",
            message,
            ({"cluster.ranks_per_node": there},) if there else (),
        )


def _precision(job: Job) -> Iterator[Objection]:
    """A device whose row has one of the 16-bit formats and not the job's does not compute in it."""
    device = job.cluster.device
    wanted = job.training.precision
    halves = [kind for kind in ("bf16", "fp16") if kind in device.peak_tflops]
    if wanted == "fp32" or wanted in device.peak_tflops or not halves:
        return
    message = (
        f"{device.label or device.name} has no arithmetic in {wanted} by the device table"
        f" (devices.{device.name}.peak_tflops)"
    )
    changes = tuple({"training.precision": kind} for kind in (*halves, "fp32"))
    yield Objection("no-such-precision", "training.precision", message, changes)


def _profile(job: Job) -> Iterator[Objection]:
    """A profile that would never be taken."""
    if job.profile is None:
        return
    if job.profile.start > job.training.train_iters:
        message = (
            f"profile.start {job.profile.start} is beyond train_iters {job.training.train_iters}"
        )
        yield Objection("profile-beyond-end", "profile.start", message)
    if beyond := [rank for rank in job.profile.ranks if rank >= job.world_size]:
        yield Objection(
            "profile-of-no-rank",
            "profile.ranks",
            f"profile.ranks {', '.join(map(str, beyond))}: the world has ranks 0 to"
            f" {job.world_size - 1}",
        )
