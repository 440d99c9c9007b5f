"""The time model's answer for a job: its parts, how sure it is, and what was assumed."""

from __future__ import annotations

import math

from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.optimizers import kept_of
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import attended_part
from trainkit.plan.duration import Speed
from trainkit.plan.layout import Layout, layout_of
from trainkit.plan.parameter_shapes import newton_schulz_flops
from trainkit.plan.rules import Rules
from trainkit.plan.time.constants import fitted, fitted_rows, kind_of, machine, spread
from trainkit.plan.time.host import SOFTWARE, host_constants, host_machine
from trainkit.plan.time.layer import OLD
from trainkit.plan.time.setup import Hardware, RankSplit, Setup, Shape
from trainkit.plan.time.step import StepTime, step_time

ROWS = {  # of hardware.toml, by devices' names
    "v100-sxm-16gb": "v100",
    "v100-sxm-32gb": "v100",
    "a100-sxm-40gb": "a100-40",
    "a100-sxm-80gb": "a100-80",
    "h100-sxm-80gb": "h100",
    "h200-sxm-141gb": "h200",
    "b200-sxm-192gb": "b200",
    "a6000-48gb": "a6000",
    "l40s-48gb": "l40s",
}
MODEL_OF_ROWS = "a100-80"  # whose proportions a device has that is in no row
# of a prediction's logarithm, besides the spread of the fit
OWN_ENGINE = 0.12  # no public timings of the native trainer on GPUs
NO_ROW = 0.3
HOST = 0.2  # after one run has corrected it; assumed, not measured
NO_NETWORK = 0.15
ONE_CARD = 12.5e9  # bytes a second of a node whose device has no reference design: 100 Gb/s
TENTHS = 1.2816  # standard deviations from the middle to the 10th and the 90th percentile


@dataclass(frozen=True)
class StepEstimate:
    """A predicted step.

    Args:
        time: its terms.
        deviation: of its logarithm.
        assumed: what is not known and was assumed instead.
        not_fitted: the kind of trainer, precision and device, where no public timing of it is
            among those that the constants were fitted on; else "".
    """

    time: StepTime
    deviation: float
    assumed: tuple[str, ...]
    not_fitted: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds that four of five steps like this lie between."""
        factor = math.exp(TENTHS * self.deviation)
        return self.time.seconds / factor, self.time.seconds * factor


def _generic(job: Job, per_node: int, network: float | None) -> Hardware | None:
    """A device of no row that jobs.toml gives a peak, with the proportions of another."""
    narrow = 8 if job.training.precision == "fp8" else 16
    peaks = job.cluster.device.peak_tflops
    peak = peaks.get(job.training.precision)
    like = machine(MODEL_OF_ROWS, per_node=per_node, network=network)
    if peak is None or like is None:
        return None
    half = peak if narrow == 16 else peaks.get("bf16", peak / 2)
    part = half * 1e12 / like.peak
    return Hardware(
        generation=like.generation,
        peak=peak * 1e12,
        peak16=half * 1e12,
        narrow=narrow,
        memory=like.memory * part,
        link=like.link * part,
        network=like.network if network else like.network * part,
        domain=per_node,
        cores=like.cores,
        per_node=per_node,
        known=False,
    )


def machine_of(job: Job) -> tuple[Hardware | None, tuple[str, ...]]:
    """The job's device and network, and what of them was assumed; None where the device's peak
    is not known."""
    device = job.cluster.device
    given = job.cluster.network_gb_per_second
    network = given * 1e9 if given else None
    peak = device.peak_tflops.get(job.training.precision)
    if device.kind == "cpu" or peak is None:
        return None, ()
    assumed = []
    if network is None and job.nodes > 1:
        assumed.append("the network (clusters.X.network_gb_per_second)")
    per_node = job.ranks_per_node
    if device.name not in ROWS:
        assumed.append(f"memory and links of {device.name}")
        return _generic(job, per_node, network), tuple(assumed)
    sockets = job.cluster.env.get("NCCL_IB_DISABLE") == "1"
    bits = {"fp32": 32, "fp8": 8}.get(job.training.precision, 16)
    row = ROWS[device.name]
    found = machine(
        row, bits=bits, per_node=per_node, network=network, world=job.world_size, sockets=sockets
    )
    if found is None:
        found = machine(row, bits=bits, per_node=per_node, network=ONE_CARD)
    if found is None:
        return None, tuple(assumed)
    if bits == 32:
        found = Hardware(**{**vars(found), "peak": peak * 1e12})
    return found, tuple(assumed)


def software_of(rules: Rules) -> str:
    """The kind of trainer that an engine is."""
    if rules.states is None:
        return "fsdp"
    if rules.saves_scores:
        return OLD
    return "megatron"


def shape_of(job: Job, vocab: int) -> Shape:
    """The job's model."""
    model, moe = job.model, job.model.moe
    shape = Shape(
        layers=model.blocks,
        hidden=model.hidden_size,
        query=model.num_attention_heads * model.head_size,
        key=model.query_groups * model.head_size,
        heads=model.num_attention_heads,
        ffn=model.ffn_width,
        projections=model.mlp.projections,
        seq=model.seq_length,
        vocab=vocab,
        windows=attended_part(model),
    )
    if moe is None:
        return shape
    return replace(
        shape,
        ffn=moe.ffn_hidden_size,
        experts=moe.num_experts,
        topk=moe.router_topk,
        shared=moe.shared_expert_intermediate_size or 0,
        dense=moe.first_dense_layers / model.blocks,
        dense_ffn=model.ffn_width,
    )


def split_of_job(job: Job, layout: Layout) -> RankSplit:
    """The job's layout."""
    stages = layout.layers_by_stage
    last = stages[layout.last_stage] + layout.further
    zero = job.parallelism.zero_stage
    layers = job.model.blocks
    again = -(-layers // job.training.recompute_every) / layers
    return RankSplit(
        world=layout.world,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual,
        data=layout.data,
        context=layout.context,
        exchanges=job.parallelism.cp_comm_type == "a2a",
        expert=layout.expert,
        zero=zero,
        shard=layout.shard if zero else 1,
        sequence=layout.sequence,
        recompute=job.training.recompute_granularity,
        micro_batch=job.training.micro_batch_size,
        global_batch=job.global_batch_size,
        zero_bubble=layout.v_shaped,
        recomputed=again,
        stage_layers=max(*stages, last),
        last_layers=last,
        moments=len(kept_of(job.training, "matrix")),
        update_flops=_update_flops(job, layout),
        expert_tensor=layout.expert_tensor if job.model.moe else None,
        expert_shard=(layout.expert_shard if zero else 1) if job.model.moe else None,
    )


def _update_flops(job: Job, layout: Layout) -> float:
    """Of the rank with most: matrices are shared out, none is cut."""
    flops = newton_schulz_flops(job.model, job.training)
    sharing = layout.shard * layout.tensor * layout.pipeline
    return max(sum(flops) / sharing, max(flops, default=0))


def estimate_step(job: Job, rules: Rules, vocab: int) -> StepEstimate | None:
    """How long a step takes; None where the device's peak is not known.

    Args:
        job: the job.
        rules: of its engine.
        vocab: size of the vocabulary, padded.
    """
    device, assumed = machine_of(job)
    if device is None:
        return None
    split = split_of_job(job, layout_of(job))
    software = software_of(rules)
    setup = Setup(shape_of(job, vocab), split, device, software)
    variance = spread()["experts" if job.model.moe else "dense"] ** 2
    not_fitted = ""
    if kind_of(device, software) not in fitted_rows():
        not_fitted = kind_of(device, software)
        variance += NO_ROW**2
    elif rules.states is None:
        not_fitted = "the native trainer on GPUs: the constants are other FSDP trainers'"
        variance += OWN_ENGINE**2
    for word in assumed:
        variance += (NO_NETWORK if word.startswith("the network") else NO_ROW) ** 2
    return StepEstimate(step_time(setup, fitted()), math.sqrt(variance), assumed, not_fitted)


# A device of which nothing is known, for ranking alone: of a processor's proportions, where
# arithmetic is slow and messages go through memory (assumed).
ANY = Hardware(
    generation="a100",
    peak=1e11,
    peak16=1e11,
    narrow=16,
    memory=1e10,
    link=2e9,
    network=1e9,
    domain=8,
    cores=1,
    per_node=8,
    known=False,
)


def host_estimate(job: Job, vocab: int, cores: int | None) -> StepEstimate:
    """A step of CPU ranks, for a time once a run has said how fast this machine is.

    Args:
        job: the job.
        vocab: size of the vocabulary, padded.
        cores: of a node; None: not known.
    """
    split = split_of_job(job, layout_of(job))
    host = Setup(shape_of(job, vocab), split, host_machine(job, cores), SOFTWARE)
    return StepEstimate(step_time(host, host_constants()), HOST, ())


def ranking_step(job: Job, rules: Rules, vocab: int, cores: int | None = None) -> StepTime:
    """A step on a device that nothing is known of: good for an order of layouts, for no time
    before a run was measured.

    Args:
        job: the job.
        rules: of its engine.
        vocab: size of the vocabulary, padded.
        cores: of a node, where it has no other device.
    """
    if job.cluster.device.kind == "cpu":
        return host_estimate(job, vocab, cores).time
    split = split_of_job(job, layout_of(job))
    device = replace(ANY, domain=job.ranks_per_node, per_node=job.ranks_per_node)
    return step_time(Setup(shape_of(job, vocab), split, device, software_of(rules)), fitted())


def predicted_speed(job: Job, estimate: StepEstimate, model_flops: int) -> Speed:
    """Speed by the time model; MFU is of the model's FLOPs.

    Args:
        job: the job.
        estimate: of one step.
        model_flops: of a token.
    """
    work = job.global_batch_size * job.model.seq_length
    tokens = work / estimate.time.seconds
    slowest, fastest = (work / seconds for seconds in reversed(estimate.interval))
    peak = job.cluster.device.peak_tflops.get(job.training.precision)
    source = f"predicted, between {slowest:,.0f} and {fastest:,.0f}; --explain time says how"
    if estimate.assumed:
        source += f". Assumed: {', '.join(estimate.assumed)}"
    if estimate.not_fitted:
        source += f". Not fitted: {estimate.not_fitted}"
    return Speed(
        tokens_per_second=tokens,
        mfu=tokens * model_flops / (job.world_size * peak * 1e12) if peak else None,
        source=source,
        interval=(slowest, fastest),
        step_terms=dict(estimate.time.terms),
        not_fitted=estimate.not_fitted,
    )
