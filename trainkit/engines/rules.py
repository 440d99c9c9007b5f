"""Each engine's rules for `trainkit.plan`: which layouts it takes, and how many bytes a
parameter it holds and writes.

Sources: [mlm] Megatron-LM: docs of its distributed optimizer (bytes a parameter), arguments.py
validate_args (divisibility); [ds] DeepSpeed: Rajbhandari et al. 2020, arXiv:1910.02054, section
3 (16 bytes); its pipeline partitions `type:transformer|mlp` unevenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainkit.engines.native import native_objections
from trainkit.jobs.devices import Precision
from trainkit.jobs.schema import Job
from trainkit.plan.layout import layout_of
from trainkit.plan.objection import Objection
from trainkit.plan.rules import Rules, StateBytes

_FP32 = StateBytes(weights=4, gradients=4, master=0, moment=4)
# 16-bit weights 2, fp32 master 4, Adam's moments 8: 14 bytes. GPT-NeoX-20B 268 GiB, BLOOM-176B
# 2.244 TiB as published.
_WRITTEN: dict[Precision, int] = {"fp32": 4, "bf16": 6, "fp16": 6}
_NEMO_SAVES = "exp_manager.create_checkpoint_callback"
# What the native trainer has and no published engine does.
_PUBLISHED = Rules(
    zero_bubble=False,
    uneven_shares=False,
    repeats_groups=False,
    replicates=False,
)

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


_MEGATRON = replace(
    _PUBLISHED,
    engine="megatron-lm",
    # "Number of layers should be divisible by the pipeline-model-parallel size"
    uneven_stages=False,
    whole_rounds=True,
    zero_stages=(0, 1),  # its distributed optimizer
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # [mlm] fp16: 20 bytes, the optimizer has an fp32 copy of gradients too; bf16: 18, gradients are
    # accumulated in fp32
    states={"fp16": StateBytes(2, 2, 8, 4), "bf16": StateBytes(2, 4, 4, 4), "fp32": _FP32},
    logit_bytes=10,  # 16-bit logits, the fp32 copy that softmax works in, its gradient
    checkpoint_weights=_WRITTEN,
    deletes_old=False,
    uncounted=("num_experts", "context_parallel_size", "multi_latent_attention", "mtp_num_layers"),
    objections=_megatron_objections,
    # 42 runs of 1.3B to 205B with Megatron-DeepSpeed on V100 and A100 (bigscience at 9e64edec2ad1,
    # chronicles); median 1.17, BLOOM itself 1.39
    memory_band=(1.07, 1.42),
)

_NEMO = replace(
    _PUBLISHED,
    engine="nemo",
    families=("gpt", "llama"),  # Llama: 24.12 alone, which its limits ask
    uneven_stages=False,
    whole_rounds=True,
    zero_stages=(0, 1),
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # Gradients in 16 bits: its 5B runs at micro-batch 2 on one node of A100-80GB without
    # recomputation (22.09's table of throughput), which 18 bytes
    # a parameter would not leave room for.
    states={"fp16": StateBytes(2, 2, 4, 4), "bf16": StateBytes(2, 2, 4, 4), "fp32": _FP32},
    saves_scores=True,  # 22.09 has no fused attention
    logit_bytes=10,
    checkpoint_weights=_WRITTEN,
    saves_key=_NEMO_SAVES,
    uncounted=("model.num_moe_experts", "model.context_parallel_size"),
)

RULES: dict[str, Rules] = {
    "native": Rules(objections=native_objections),
    "gpt-neox": replace(
        _PUBLISHED,
        engine="gpt-neox",
        virtual_stages=False,  # DeepSpeed's pipeline has none
        zero_in_pipeline=(0, 1),
        pads_weights=True,
        # [ds]
        states={"fp16": StateBytes(2, 2, 4, 4), "bf16": StateBytes(2, 2, 4, 4), "fp32": _FP32},
        saves_scores=True,
        # fp16 logits and gradient, four fp32 copies: 2 GiB of the 20B's 27 GB on 24 A100-40GB
        logit_bytes=20,
        uncounted=("moe_num_experts",),
        bucket_elements=5 * 10**8,  # [ds] reduce_bucket_size; a job's own stands in engine_args
        checkpoint_weights=_WRITTEN,
        # the same runs; median 1.18, BLOOM itself 1.47; the 20B of Lambda Labs 1.05
        memory_band=(0.94, 1.47),
    ),
    "megatron-lm": _MEGATRON,
    "nemo": _NEMO,
    "neuronx-nemo": replace(
        _PUBLISHED,
        engine="neuronx-nemo",
        families=("gpt",),  # conf/megatron_gpt_config.yaml, which its GPT scripts read
        uneven_stages=False,
        whole_rounds=True,
        zero_stages=(0, 1),  # wrap_with_zero
        zero_in_pipeline=(0, 1),
        pads_weights=True,
        # XLA_USE_BF16: all tensors are bf16 on the device
        states={"fp16": StateBytes(2, 2, 0, 2), "bf16": StateBytes(2, 2, 0, 2), "fp32": _FP32},
        saves_scores=True,
        logit_bytes=10,
        # as NeMo, which it is made from; no size of its own is published
        checkpoint_weights=_WRITTEN,
        saves_key=_NEMO_SAVES,
        save_seconds=3600,  # its scripts' train_time_interval
    ),
}
