"""Megatron-LM's rules for `trainkit.plan`.

Sources: [mlm] its docs of the distributed optimizer (bytes a parameter), arguments.py
validate_args (divisibility), core/parallel_state.py (the grid of experts, which is the plan's).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainkit.engines.rules import FP32, PUBLISHED, WRITTEN
from trainkit.jobs.schema import Job
from trainkit.plan.checks import TP
from trainkit.plan.grid_checks import COMM, CP, ETP
from trainkit.plan.layout import layout_of
from trainkit.plan.objection import Objection
from trainkit.plan.rules import StateBytes

_NONE = "which there are none of on CPUs"


def sharding_obstacle(job: Job) -> str:
    """Why Megatron-LM could not begin a job with its distributed optimizer, or not go on from its
    own checkpoints, on any node; "" where a node may have what that needs.

    Source: core/optimizer/distrib_optimizer.py of core 0.12 to 0.19 and d98e8a64. Without Apex and
    Transformer Engine (HAVE_APEX_OR_TE) it looks for the `step` of torch's Adam where nothing was
    loaded yet. In fp32 its shards are views of the parameters, into which nothing can be copied.
    """
    optimizer = "Megatron-LM's distributed optimizer"
    if job.training.optimizer != "adam":
        return f"{optimizer} takes Adam only"
    if job.cluster.device_type == "cpu":
        return (
            f"{optimizer} cannot load its own checkpoints without Apex or Transformer Engine,"
            f" {_NONE}"
        )
    if job.training.precision == "fp32":
        return f"{optimizer} cannot load its own checkpoints in fp32"
    return ""


def _megatron_objections(job: Job) -> Iterator[Objection]:
    """What needs Apex or Transformer Engine: also torch's norms assert that there is no sequence
    parallelism (core/transformer/torch_norm.py)."""
    obstacle = sharding_obstacle(job)
    if job.parallelism.zero_stage == 1 and job.data_parallel_size > 1 and obstacle:
        key = "parallelism.zero_stage"
        yield Objection("zero-not-resumed", key, f"{key} 1: {obstacle}", ({key: 0},))
    if layout_of(job).sequence and job.cluster.device_type == "cpu":
        key = "parallelism.sequence_parallel"
        message = f"{key}: Megatron-LM's norm for it is Apex's or Transformer Engine's, {_NONE}"
        yield Objection("no-sequence-parallelism", key, message, ({key: False},))
    if layout_of(job).virtual > 1 and job.cluster.device_type == "cpu":
        # deallocate_output_tensor of core/pipeline_parallel/schedules.py: losses become NaN
        key = "parallelism.virtual_pipeline_model_parallel_size"
        message = f"{key}: Megatron-LM frees what gloo still sends, on CPUs; leave it out"
        yield Objection("no-virtual-stages", key, message)
    yield from _context_objections(job)
    yield from _expert_objections(job)


def _context_objections(job: Job) -> Iterator[Objection]:
    """Attention over several ranks is Transformer Engine's (core/transformer/
    dot_product_attention.py asserts it), which deals whole heads of keys and values (its
    context_parallel.py, AttnFuncWithCPAndQKVOA2A)."""
    size = layout_of(job).context
    if size == 1:
        return
    if job.cluster.device_type == "cpu":
        message = f"{CP} {size}: attention over several ranks is Transformer Engine's, {_NONE}"
        yield Objection("no-context-parallelism", CP, message, ({CP: 1},))
    tensor = layout_of(job).tensor
    if job.parallelism.cp_comm_type == "a2a" and job.model.query_groups % (tensor * size):
        yield Objection(
            "groups-not-dealt",
            COMM,
            f"cp_comm_type = 'a2a': num_query_groups {job.model.query_groups} does not divide by"
            f" tensor-parallel {tensor} x context-parallel {size}, as Transformer Engine wants it",
            ({COMM: "p2p"},),
        )


def _expert_objections(job: Job) -> Iterator[Objection]:
    """MoELayer refuses to train without sequence parallelism; an expert is cut evenly (core/
    tensor_parallel/layers.py)."""
    moe = job.model.moe
    if moe is None:
        return
    layout = layout_of(job)
    if layout.tensor > 1 and not layout.sequence:
        key = "parallelism.sequence_parallel"
        yield Objection(
            "experts-without-sequence-parallelism",
            key,
            f"{TP} {layout.tensor} with experts: Megatron-LM trains them with sequence_parallel"
            " alone",
            ({TP: 1} if job.cluster.device_type == "cpu" else {key: True},),
        )
    if moe.ffn_hidden_size % layout.expert_tensor:
        yield Objection(
            "expert-not-divisible",
            ETP,
            f"moe.ffn_hidden_size {moe.ffn_hidden_size} does not divide by"
            f" expert_tensor_parallel_size {layout.expert_tensor}",
            ({ETP: 1},),
        )


RULES = replace(
    PUBLISHED,
    engine="megatron-lm",
    counts_ends=True,
    # "Number of layers should be divisible by the pipeline-model-parallel size"
    uneven_stages=False,
    whole_rounds=True,
    zero_stages=(0, 1),  # its distributed optimizer
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # [mlm] fp16: 20 bytes, the optimizer has an fp32 copy of gradients too; bf16: 18, gradients are
    # accumulated in fp32
    states={"fp16": StateBytes(2, 2, 8, 4), "bf16": StateBytes(2, 4, 4, 4), "fp32": FP32},
    logit_bytes=10,  # 16-bit logits, the fp32 copy that softmax works in, its gradient
    checkpoint_weights=WRITTEN,
    deletes_old=False,
    uncounted=("mtp_num_layers",),
    objections=_megatron_objections,
    # 42 runs of 1.3B to 205B with Megatron-DeepSpeed on V100 and A100 (bigscience at 9e64edec2ad1,
    # chronicles); median 1.17, BLOOM itself 1.39
    memory_band=(1.07, 1.42),
)
