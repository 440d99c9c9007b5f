"""Words of Megatron-LM for models with experts and for attention by latents.

Sources: core/transformer/moe/router.py and moe_utils.py, core/transformer/transformer_config.py and
core/transformer/multi_latent_attention.py of core 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from trainkit.engines.megatron_lm.words import MegatronWords
from trainkit.engines.options import release
from trainkit.families.contract import Routing
from trainkit.jobs.experts import Experts
from trainkit.jobs.schema import Job, Model

_NATIVE = "engine = 'native' has it"


def put_experts(words: MegatronWords, job: Job) -> None:
    """What [models.X.moe] says, and how the ranks share it."""
    model = job.model
    moe = model.moe
    if moe is None:
        return
    if not words.has("num-experts"):
        words.refuse(f"model.moe: {words.version} has no experts", "use core 0.12 or later")
        return
    if job.cluster.device_type == "cpu" and (0, 13) <= release(words.table.version) < (0, 17):
        words.refuse(  # te_general_gemm of moe_utils.py: NameError
            f"model.moe on CPUs: the router of {words.version} is Transformer Engine's, which there"
            " is none of there",
            "use core 0.12, or 0.17 or later",
        )
    words.put_said("num-experts", "moe-router-topk", "moe-ffn-hidden-size")
    words.put_said("moe-shared-expert-intermediate-size")
    if moe.first_dense_layers:
        pattern = f"([0]*{moe.first_dense_layers}+[1]*{model.num_layers - moe.first_dense_layers})"
        words.put("moe-layer-freq", pattern, "model.moe.first_dense_layers")
    for problem in routing_problems(model.routing):
        words.refuse(f"model.moe.{problem}", _NATIVE)
    _refuse_balance(words, moe, model.routing)
    _put_router(words, moe, model.routing)
    p = job.parallelism
    if p.expert_model_parallel_size > 1:
        words.put_said("expert-model-parallel-size")
        if job.training.precision == "fp16" and release(words.table.version) < (0, 16):
            words.refuse(
                "parallelism.expert_model_parallel_size"
                f" {p.expert_model_parallel_size} with training.precision = 'fp16': {words.version}"
                " has expert parallelism in bf16 and fp32 alone",
                "set training.precision = 'bf16', or use core 0.16 or later",
            )
    words.put_said("expert-tensor-parallel-size")
    # The default gathers all tokens on all ranks; what comes out is the same.
    words.put("moe-token-dispatcher-type", "alltoall", "model.moe")
    if job.cluster.device_type == "cuda" and job.training.precision == "bf16":
        words.put("moe-grouped-gemm", True, "model.moe")  # of Transformer Engine


def _put_router(words: MegatronWords, moe: Experts, routing: Routing) -> None:
    # Weights are in fp32 with every engine; without it they are rounded as activations are.
    words.put("moe-router-dtype", "fp32", "model.moe")
    key = "model.moe.router_score_function"
    words.put_unless_default("moe-router-score-function", routing.score, key)
    if softmax_of_all(routing):
        words.put("moe-router-pre-softmax", True, "model.moe.router_pre_softmax")
    if routing.scale != 1:
        words.put_said("moe-router-topk-scaling-factor")
    words.put_said("moe-router-num-groups", "moe-router-group-topk")
    if routing.expert_bias:
        words.put("moe-router-enable-expert-bias", True, "model.moe.router_enable_expert_bias")
        words.put_said_unless_default("moe-router-bias-update-rate")
    if moe.aux_loss_coeff:
        words.put_said("moe-router-load-balancing-type", "moe-aux-loss-coeff")
    if moe.z_loss_coeff:
        words.put_said("moe-z-loss-coeff")


def softmax_of_all(routing: Routing) -> bool:
    """Whether a router needs --moe-router-pre-softmax: softmax of all experts that is made to sum
    to 1 over the best is that of the best alone, which Megatron-LM takes by itself."""
    return routing.score == "softmax" and routing.pre_softmax and not routing.normalized


def routing_problems(routing: Routing) -> Iterator[str]:
    """Routers that no version has, by their keys of [models.X.moe]
    (topk_routing_with_score_function of core/transformer/moe/moe_utils.py)."""
    if routing.score == "sigmoid" and routing.chosen > 1 and not routing.normalized:
        yield (
            "router_norm_topk_prob = false with router_score_function = 'sigmoid': Megatron-LM"
            " makes these weights sum to 1"
        )
    summed = routing.groups and routing.chosen > routing.kept_groups
    if summed and routing.score == "softmax" and routing.pre_softmax and routing.normalized:
        yield (
            f"router_num_groups {routing.groups} with router_pre_softmax and router_norm_topk_prob:"
            " Megatron-LM judges groups by sums of logits there, as router_pre_softmax = false does"
        )


def _refuse_balance(words: MegatronWords, moe: Experts, routing: Routing) -> None:
    if moe.expert_capacity_factor is not None:
        words.refuse(
            f"model.moe.expert_capacity_factor {moe.expert_capacity_factor:g}: Megatron-LM's is of"
            " the tokens of a rank, so that each layout drops others",
            _NATIVE,
        )
    if moe.aux_loss_coeff and moe.router_load_balancing_type == "global_aux_loss":
        words.refuse(
            "model.moe.router_load_balancing_type = 'global_aux_loss': Megatron-LM counts the"
            " micro-batches of the step so far, not the step before",
            _NATIVE,
        )
    chooses = routing.groups or routing.expert_bias
    if moe.aux_loss_coeff and chooses and release(words.table.version) < (0, 13):
        words.refuse(
            f"model.moe.aux_loss_coeff {moe.aux_loss_coeff:g} with groups or a bias: in"
            f" {words.version} it counts the experts that these choose, not the best",
            "use core 0.13 or later",
        )


# of the stretching that attention by latents has
FIXED_YARN: Mapping[str, object] = MappingProxyType(
    {
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
    }
)


def put_latents(words: MegatronWords, model: Model) -> None:
    """What [models.X.mla] says, the stretching of its rotary positions, and modules that predict
    one token more, which families with latents have."""
    if model.mla is None:
        return
    if not words.has("multi-latent-attention"):
        words.refuse(f"model.mla: {words.version} has no latents", "use core 0.12 or later")
        return
    words.put("multi-latent-attention", True, "model.mla")
    words.put_said("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim")
    words.put_said("v-head-dim", "mtp-num-layers", "mtp-loss-scaling-factor")
    words.put("qk-layernorm", True, "model.mla")  # of the latents
    if model.layernorm_epsilon != 1e-6:
        words.refuse(
            f"model.layernorm_epsilon {model.layernorm_epsilon:g} with model.mla: in"
            f" {words.version} the latents' norms have it too, where they have 1e-06",
            "set layernorm_epsilon = 1e-6, or engine = 'native'",
        )
    _put_stretching(words, model)


def _put_stretching(words: MegatronWords, model: Model) -> None:
    """YaRN is what these models have by themselves; by 1 it changes nothing."""
    scaling = model.rope_scaling
    key = "model.rope_scaling"
    if scaling is None:
        words.put_unless_default("rotary-scaling-factor", 1.0, key)
        return
    if scaling.type != "yarn":
        words.refuse(
            f"{key}.type = {scaling.type!r} with model.mla: {words.version} has 'yarn' there",
            _NATIVE,
        )
        return
    for name, value in FIXED_YARN.items():
        found = getattr(scaling, name)
        if found != value:
            words.refuse(
                f"{key}.{name} {found} with model.mla: in {words.version} it is {value} and cannot"
                " be set",
                _NATIVE,
            )
    if scaling.mscale != scaling.mscale_all_dim and release(words.table.version) < (0, 14):
        words.refuse(
            f"{key}.mscale {scaling.mscale} with mscale_all_dim {scaling.mscale_all_dim}:"
            f" {words.version} scales scores by mscale",
            "use core 0.14 or later",
        )
    words.put("rotary-scaling-factor", scaling.factor, f"{key}.factor")
    words.put("mscale", scaling.mscale or 1.0, f"{key}.mscale")
    words.put("mscale-all-dim", scaling.mscale_all_dim or 0.0, f"{key}.mscale_all_dim")
