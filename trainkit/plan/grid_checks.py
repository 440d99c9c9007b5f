"""Why experts, or the tokens of a sample, cannot be dealt to the ranks of a stage, or what they
compute cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.plan.layout import Layout, nearest
from trainkit.plan.objection import Change, Objection

CP = "parallelism.context_parallel_size"
COMM = "parallelism.cp_comm_type"
REPLICAS = "parallelism.data_parallel_replicate_size"
EP = "parallelism.expert_model_parallel_size"
ETP = "parallelism.expert_tensor_parallel_size"
REPLAY = "training.replay_interval"


def contexts(job: Job, layout: Layout) -> list[int]:
    """The nearest context-parallel sizes that divide the world and the sequence; none where there
    is no context parallelism."""
    others = layout.tensor * layout.pipeline
    if layout.context == 1:
        return []
    return nearest(
        layout.context,
        lambda n: (
            layout.world % (others * n) == 0
            and (n == 1 or job.model.seq_length % (2 * n * _parts(job, layout)) == 0)
        ),
    )


def _parts(job: Job, layout: Layout) -> int:
    """What a tensor-parallel group cuts a rank's tokens into, for sequence parallelism or to route
    them."""
    return layout.tensor if job.model.moe else layout.sequence_parts


def context_objections(job: Job, layout: Layout) -> Iterator[Objection]:
    """The tokens of a sample can be dealt to its ranks, and attention can see them all."""
    size, length = layout.context, job.model.seq_length
    if size == 1:
        return
    chunks = 2 * size * _parts(job, layout)
    if length % chunks:
        split = ""
        if _parts(job, layout) > 1:
            why = "sequence_parallel" if layout.sequence else "whose ranks route a part each"
            split = f" x tensor-parallel {layout.tensor} ({why})"
        message = (
            f"seq_length {length} does not divide by 2 x context-parallel {size}{split} = {chunks}"
        )
        lengths = [n for n in (length // chunks * chunks, -(-length // chunks) * chunks) if n]
        changes = ({CP: n} for n in contexts(job, layout))
        yield Objection(
            "context-not-divisible",
            CP,
            message,
            (*changes, *({"model.seq_length": n} for n in lengths)),
        )
    if job.parallelism.cp_comm_type == "a2a":
        yield from _dealt_heads(job, layout)
    if job.model.attention_dropout > 0:
        yield Objection(
            "dropout-in-context",
            "model.attention_dropout",
            f"attention_dropout {job.model.attention_dropout} with context-parallel size {size}:"
            " no rank draws random numbers for the tokens of others",
            ({"model.attention_dropout": 0}, {CP: 1}),
        )
    if job.model.mtp_num_layers:
        yield Objection(
            "mtp-in-context",
            "model.mtp_num_layers",
            f"mtp_num_layers with context-parallel size {size}: the token after the next one may"
            " lie on another rank, which is not built",
            ({CP: 1},),
        )
    if job.training.compile and job.is_native:
        yield Objection(
            "compile-in-context",
            "training.compile",
            f"training.compile with context-parallel size {size}: attention that talks to other"
            " ranks is not compiled",
            ({"training.compile": False}, {CP: 1}),
        )


def _dealt_heads(job: Job, layout: Layout) -> Iterator[Objection]:
    """cp_comm_type = "a2a": each rank has as many heads, and whole heads of keys and values, or
    one that several ranks have."""
    tensor, size = layout.tensor, layout.context
    heads = job.model.num_attention_heads
    groups = max(1, job.model.query_groups // tensor)
    if heads % (tensor * size):
        name, count = "num_attention_heads", heads
    elif groups % size and size % groups:
        name, count = "num_query_groups", job.model.query_groups
    else:
        return
    across = f"tensor-parallel {tensor} x context-parallel {size}"
    yield Objection(
        "heads-not-dealt",
        COMM,
        f"cp_comm_type = 'a2a': {name} {count} does not divide by {across}",
        ({COMM: "p2p"},),
    )


def expert_objections(job: Job, layout: Layout) -> Iterator[Objection]:
    """Experts divide over their ranks, and those over the ranks of a stage."""
    moe = job.model.moe
    if moe is None:
        yield from _no_experts(job)
        return
    split = layout.expert_tensor
    yield from _expert_ranks(layout, moe.num_experts)
    if moe.ffn_hidden_size < split:
        message = (
            f"an expert of width {moe.ffn_hidden_size} (moe.ffn_hidden_size) has no row for some of"
            f" expert_tensor_parallel_size {split} ranks"
        )
        yield Objection("expert-too-narrow", ETP, message, ({ETP: 1},))
    if job.training.compile and job.training.recompute_granularity == "selective":
        message = (
            "compile = true with recompute_granularity 'selective': what is compiled of a block"
            " with experts would all be computed again"
        )
        ways: tuple[Change, ...] = tuple(
            {"training.recompute_granularity": other} for other in ("full", "none")
        )
        ways = (*ways, {"training.compile": False})
        yield Objection("compiled-selective-experts", "training.compile", message, ways)


def _no_experts(job: Job) -> Iterator[Objection]:
    """Keys of experts for a model that has none."""
    parallelism = job.parallelism
    for key, ranks in (
        (EP, parallelism.expert_model_parallel_size),
        (ETP, parallelism.expert_tensor_parallel_size or 1),
    ):
        if ranks > 1:
            message = (
                f"{key.rpartition('.')[2]} {ranks}, but family {job.model.family!r} of model"
                f" {job.model.name!r} has no experts"
            )
            yield Objection("no-experts", key, message, ({key: 1},))


def _expert_ranks(layout: Layout, count: int) -> Iterator[Objection]:
    """`count` experts of a layer over the ranks of a stage, and copies of them over the others."""
    expert, split = layout.expert, layout.expert_tensor
    stage = layout.tensor * layout.data_context

    def fits(expert: int) -> bool:
        return count % expert == 0 and stage % (expert * split) == 0

    nearby: tuple[Change, ...] = tuple({EP: n} for n in nearest(expert, fits, most=count))
    if count % expert:
        message = f"num_experts {count} does not divide by expert_model_parallel_size {expert}"
        yield Objection("experts-not-divisible", EP, message, nearby)
        return
    context = f" x context-parallel {layout.context}" if layout.context > 1 else ""
    both = f"expert_model_parallel_size {expert} x expert_tensor_parallel_size {split}"
    copies, rest = divmod(stage, expert * split)
    if rest:
        message = (
            f"{both} does not divide the ranks of a stage, tensor-parallel {layout.tensor} x"
            f" data-parallel {layout.data}{context} = {stage}"
        )
        whole: tuple[Change, ...] = ({ETP: 1},) if split > 1 else ()
        yield Objection("expert-ranks-not-divisible", EP, message, (*nearby, *whole))
    elif layout.shard > 1 and copies % layout.replicate:
        message = (
            f"data_parallel_replicate_size {layout.replicate} does not divide the {copies} ranks of"
            f" a stage that hold the same experts under {both}"
        )
        fewer = nearest(layout.replicate, lambda n: copies % n == 0, most=layout.data)
        changes: tuple[Change, ...] = tuple({REPLICAS: n} for n in fewer)
        yield Objection("expert-copies-not-divisible", REPLICAS, message, (*changes, *nearby))


def replay_objections(job: Job) -> Iterator[Objection]:
    """training.replay_interval: another rank can compute the same, to the bit."""
    if job.training.replay_interval is None:
        return
    degrees = degrees_of(job)
    asked = f"replay_interval {job.training.replay_interval}"
    if degrees.pipeline > 1:
        yield Objection(
            "replay-in-pipeline",
            REPLAY,
            f"{asked} with {degrees.pipeline} pipeline stages: a micro-batch by itself would leave"
            " all stages but one idle, which is not built; leave replay_interval out",
            ({"parallelism.pipeline_model_parallel_size": 1},),
        )
    elif degrees.world < 2 * degrees.together:
        yield Objection(
            "nobody-to-replay",
            REPLAY,
            f"{asked}, but all {degrees.world} ranks compute each micro-batch together, so that"
            " none can compute it too: more ranks, or leave replay_interval out",
        )
    if job.cluster.device_type == "cuda" and not job.training.deterministic:
        yield Objection(
            "replay-not-deterministic",
            REPLAY,
            f"{asked} without training.deterministic: on GPUs two ranks then round differently"
            " without any fault",
            ({"training.deterministic": True},),
        )
