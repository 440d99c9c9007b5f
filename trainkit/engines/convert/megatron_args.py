"""A model's shape in Megatron-LM's arguments: written into its checkpoints, and compared with what
stands in one. Names and meaning: Megatron-LM, training/arguments.py and
load_args_from_checkpoint of training/checkpointing.py, core 0.12 to 0.16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.engines.convert.options import FileLayout
from trainkit.engines.megatron_lm.experts import FIXED_YARN, routing_problems, softmax_of_all
from trainkit.jobs.schema import Model

# Fixed numbers of --use-rope-scaling (core/models/common/embeddings/rotary_pos_embedding.py).
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What would make the tensors mean something else, unless a model's shape says it.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "heterogeneous_layers_config_path": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_latent_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_group_topk": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_pre_softmax": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_gate": (False,),
    "moe_shared_expert_intermediate_size": (None,),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "num_experts": (None, 0),
    "qk_l2_norm": (False,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "squared_relu": (False,),
    "window_size": (None,),
}
EPSILON = 1e-6  # of the norms of latents
# What is converted beyond a block of GPT-2 or Llama (Model.traits), where it is the family's own:
# other modules have no names in trainkit/train/huggingface/names.py.
CONVERTED = {("qk_norm", "head"), ("add_qkv_bias", True), ("moe", True), ("mla", True)}


def model_problems(model: Model) -> Iterator[str]:
    """What GPTModel of Megatron-core cannot be, by the key of [models.X]."""
    if model.parallel_residual:
        yield (
            "gpt_j_residual: Megatron-LM has no attention and MLP side by side"
            f" (family {model.family!r})"
        )
    for key, value in model.traits.items():
        if (key, value) not in CONVERTED or key in model.departures:
            yield f"{key} = {value!r} is not converted (family {model.family!r})"
    if model.moe is not None:
        yield from (f"moe.{problem}" for problem in routing_problems(model.routing))
    if model.mtp_num_layers:
        yield f"mtp_num_layers {model.mtp_num_layers} is not converted"
    scaling = model.rope_scaling
    if model.mla is not None:
        yield from _latent_problems(model)
    elif scaling is not None and scaling.type == "yarn":
        yield "rope_scaling.type is 'yarn', which is not converted"
    if scaling is not None and scaling.type == "llama3":
        for key, value in LLAMA3.items():
            if getattr(scaling, key) != value:
                yield (
                    f"rope_scaling.{key} is {getattr(scaling, key):g}; --use-rope-scaling has"
                    f" {value:g} only"
                )
    if scaling is not None and scaling.type == "linear":
        # GPTModel gets it from no version's pretrain_gpt.py before 0.19: positions stay as they are
        yield (
            "rope_scaling.type is 'linear'; Megatron-LM takes --rotary-seq-len-interpolation-factor"
            " and does not use it before core 0.19"
        )
    if model.rotary_base is not None and model.rotary_base % 1:
        yield f"rotary_base is {model.rotary_base:g}; --rotary-base is a whole number"


def _latent_problems(model: Model) -> Iterator[str]:
    """The same of attention by latents."""
    if model.layernorm_epsilon != EPSILON:
        yield (
            f"layernorm_epsilon {model.layernorm_epsilon:g} with mla: Megatron-LM has it in the"
            f" latents' norms, too, which have {EPSILON:g}"
        )
    scaling = model.rope_scaling
    if scaling is None:
        return
    if scaling.type != "yarn":
        yield f"rope_scaling.type is {scaling.type!r} with mla; Megatron-LM has 'yarn' there"
        return
    for key, value in FIXED_YARN.items():
        if getattr(scaling, key) != value:
            yield f"rope_scaling.{key} is {getattr(scaling, key)} with mla; it is {value} there"


def _shape(model: Model) -> dict[str, object]:
    """What the arithmetic of a model depends on."""
    family = model.architecture
    grouped = model.query_groups != model.num_attention_heads
    scaling = model.rope_scaling
    llama3 = scaling is not None and scaling.type == "llama3"
    found: dict[str, object] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": grouped,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "position_embedding_type": "learned_absolute" if family.learned_positions else "rope",
        "normalization": {"layer-norm": "LayerNorm", "rms-norm": "RMSNorm"}[family.norm.kind],
        "norm_epsilon": model.layernorm_epsilon,
        "qk_layernorm": model.query_key_norm == "head",
        "swiglu": model.mlp.gated,
        "untie_embeddings_and_output_weights": model.untied,
    }
    if not grouped:
        found["num_query_groups"] = 1  # the parser's value, not looked at
    if not family.learned_positions:
        found |= {
            "rotary_base": int(model.theta),
            "rotary_percent": float(model.rotary_fraction),
            "use_rope_scaling": llama3,
        }
    if llama3 and scaling is not None:
        found["rope_scaling_factor"] = scaling.factor
    if model.mla is not None:
        found |= _latents(model)
        del found["kv_channels"]  # of no head
    return found | _experts(model)


def _latents(model: Model) -> dict[str, object]:
    """The same of attention by latents. Rotary positions are stretched by themselves, by 1 without
    a change."""
    assert model.mla is not None
    scaling = model.rope_scaling
    return {
        **model.mla.model_dump(),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale": (scaling.mscale if scaling else None) or 1.0,
        "mscale_all_dim": (scaling.mscale_all_dim if scaling else None) or 0.0,
    }


def _experts(model: Model) -> dict[str, object]:
    """The same of experts; nothing of what is NEUTRAL."""
    moe = model.moe
    if moe is None:
        return {}
    found: dict[str, object] = {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.router_topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_score_function": model.routing.score,
    }
    if softmax_of_all(model.routing):
        found["moe_router_pre_softmax"] = True
    if model.routing.expert_bias:
        found["moe_router_enable_expert_bias"] = True
    if moe.router_topk_scaling_factor != 1:
        found["moe_router_topk_scaling_factor"] = moe.router_topk_scaling_factor
    for key in ("router_num_groups", "router_group_topk", "shared_expert_intermediate_size"):
        if (value := getattr(moe, key)) is not None:
            found[f"moe_{key}"] = value
    if dense := moe.first_dense_layers:
        found["moe_layer_freq"] = [0] * dense + [1] * (model.num_layers - dense)
    return found


def megatron_args(model: Model, layout: FileLayout, rows: int) -> dict[str, object]:
    """The `args` of a checkpoint, as far as they are of the model.

    Args:
        model: the shape.
        layout: of the files.
        rows: of the embedding, padding included.
    """
    family = model.architecture
    return {
        **{name: values[0] for name, values in NEUTRAL.items()},
        **_shape(model),
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions,
        "use_rotary_position_embeddings": not family.learned_positions,
        "add_bias_linear": family.bias,
        "add_qkv_bias": model.qkv_bias,
        "bias_gelu_fusion": model.gelu_form == "tanh",
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": layout.divisor,
        "tokenizer_type": None,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.tensor,
        "transformer_impl": layout.names or "local",
        "params_dtype": layout.dtype,
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def args_problems(
    args: Mapping[str, object], model: Model, tensor: object, stages: object
) -> Iterator[str]:
    """In what the arguments of a checkpoint contradict a job's model and the files there are. What
    an older or newer version does not say is not compared.

    Args:
        args: by name.
        model: the job's.
        tensor, stages: tensor-parallel ranks and pipeline stages that there are.
    """
    yield from model_problems(model)
    shape = _shape(model)
    for name, values in NEUTRAL.items():
        if name not in shape and args.get(name) not in (None, *values):
            yield f"{name} is {args[name]!r} there, which the job's model does not have"
    wanted: dict[str, object] = {
        **shape,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
    }
    if model.moe is not None and not model.moe.first_dense_layers:
        every = args.get("moe_layer_freq")
        if every not in (None, 1, [1] * model.num_layers):
            yield f"moe_layer_freq is {every!r} there; every layer of the job's model has experts"
    if model.sparse(0):
        del wanted["ffn_hidden_size"]  # of no layer
    for name in ("group_query_attention", "num_query_groups"):
        del wanted[name]
    groups = args.get("num_attention_heads")
    if args.get("group_query_attention"):
        groups = args.get("num_query_groups")
    if groups not in (None, model.query_groups):
        yield f"num_query_groups is {groups!r} there, {model.query_groups} for the job's model"
    for name, value in wanted.items():
        if name in args and args[name] != value:
            yield f"{name} is {args[name]!r} there, {value!r} for the job's model"


def gelu_of(args: Mapping[str, object], model: Model) -> Model:
    """The job's model with the form of GELU that the engine computed: with bias_gelu_fusion the
    tanh form, else the exact one (core/fusions/fused_bias_gelu.py)."""
    if model.gelu_form is None or "bias_gelu_fusion" not in args:
        return model
    form = "tanh" if args["bias_gelu_fusion"] else "exact"
    return model.model_copy(update={"gelu": form})
