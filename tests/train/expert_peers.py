"""transformers' DeepSeek-V3 and gpt-oss beside ours: the same shape, the same weights in its
layout; in fp64 all that it casts to fp32 is fp64, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.train.peer_shapes import VOCAB
from tests.train.peers import WideRotary, random_model
from trainkit.jobs.schema import Model
from trainkit.train.model.transformer import Transformer


def deepseek(draw: Random, **changes: Any) -> Model:
    """A small shape with any of the family's keys."""
    groups, kept = draw.choice([(None, None), (2, 1), (4, 2), (3, 2)])
    per_group, heads = draw.choice([3, 4]), draw.choice([2, 3])
    width, shared = draw.randint(6, 20), draw.choice([1, 2])
    seq_length = draw.randint(5, 20)
    keys: dict[str, Any] = {
        "num_layers": draw.randint(2, 3),
        "hidden_size": heads * draw.choice([12, 16]),
        "num_attention_heads": heads,
        "ffn_hidden_size": draw.randint(10, 40),
        "seq_length": seq_length,
        "rotary_base": draw.choice([500.0, 1e4]),
        "layernorm_epsilon": draw.choice([1e-6, 1e-3]),
        "untie_embeddings_and_output_weights": draw.choice([False, True]),
        "mla": {
            "q_lora_rank": draw.choice([None, 20]),
            "kv_lora_rank": draw.randint(8, 16),
            "qk_head_dim": draw.randint(5, 12),
            "qk_pos_emb_head_dim": draw.choice([4, 8]),
            "v_head_dim": draw.randint(3, 9),
        },
        "moe": {
            "num_experts": per_group * (groups or 2),
            "router_topk": 2 * (kept or 1),
            "ffn_hidden_size": width,
            "shared_expert_intermediate_size": shared * width,
            "first_dense_layers": draw.randint(0, 1),
            "router_num_groups": groups,
            "router_group_topk": kept,
            "router_topk_scaling_factor": draw.choice([1.0, 2.5]),
            "router_norm_topk_prob": draw.choice([False, True]),
        },
    }
    if draw.random() < 0.5:
        keys["rope_scaling"] = {
            "type": "yarn",
            "factor": draw.choice([4.0, 40.0]),
            "original_max_position_embeddings": 32,
            **draw.choice([{}, {"mscale": 0.7, "mscale_all_dim": 1.0}]),
        }
        keys["max_position_embeddings"] = 64
    return Model.model_validate({"family": "deepseek-v3", **keys, **changes})


def gpt_oss(draw: Random, **changes: Any) -> Model:
    """A small shape with any of the family's keys."""
    groups, per_group = draw.choice([1, 2]), draw.choice([1, 2, 3])
    seq_length, heads = changes.get("seq_length") or draw.randint(5, 20), groups * per_group
    experts = draw.randint(3, 6)
    keys: dict[str, Any] = {
        "num_layers": draw.randint(2, 3),
        "hidden_size": heads * draw.choice([10, 16]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": draw.choice([4, 8]),
        "seq_length": seq_length,
        "sliding_window": draw.randint(2, seq_length),
        "sliding_window_pattern": draw.choice([None, 3]),
        "layernorm_epsilon": draw.choice([1e-5, 1e-3]),
        "untie_embeddings_and_output_weights": draw.choice([False, True]),
        "moe": {
            "num_experts": experts,
            "router_topk": draw.randint(2, experts),
            "ffn_hidden_size": draw.randint(6, 20),
        },
    }
    if draw.random() < 0.7:
        keys["rope_scaling"] = {
            "type": "yarn",
            "factor": draw.choice([4.0, 32.0]),
            "original_max_position_embeddings": 32,
            "truncate": draw.choice([False, True]),
        }
        keys["max_position_embeddings"] = 64
    return Model.model_validate({"family": "gpt-oss", **keys, **changes})


def config_of(model: Model) -> Any:
    """transformers' configuration of the shape."""
    transformers = pytest.importorskip("transformers")
    moe, mla, stretched = model.moe, model.mla, model.rope_scaling
    assert moe is not None
    rope: dict[str, Any] = {"rope_type": "default"}
    if stretched is not None:
        rope = {"rope_type": "yarn", **stretched.model_dump(exclude_none=True)}
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.layernorm_epsilon,
        "tie_word_embeddings": not model.untied,
        "rope_parameters": {"rope_theta": model.theta, **rope},
        "num_experts_per_tok": moe.router_topk,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "use_cache": False,
    }
    if mla is None:
        kinds = {False: "full_attention", True: "sliding_attention"}
        return transformers.GptOssConfig(
            **shared,
            head_dim=model.head_size,
            intermediate_size=moe.ffn_hidden_size,
            num_local_experts=moe.num_experts,
            sliding_window=model.sliding_window,
            layer_types=[kinds[model.slides(layer)] for layer in range(model.num_layers)],
        )
    assert mla is not None and moe.shared_expert_intermediate_size is not None
    return transformers.DeepseekV3Config(
        **shared,
        intermediate_size=model.ffn_width,
        moe_intermediate_size=moe.ffn_hidden_size,
        n_routed_experts=moe.num_experts,
        n_shared_experts=moe.shared_expert_intermediate_size // moe.ffn_hidden_size,
        routed_scaling_factor=moe.router_topk_scaling_factor,
        n_group=moe.router_num_groups or 1,
        topk_group=moe.router_group_topk or 1,
        norm_topk_prob=model.routing.normalized,
        first_k_dense_replace=moe.first_dense_layers,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_head_dim,
        qk_rope_head_dim=mla.qk_pos_emb_head_dim,
        v_head_dim=mla.v_head_dim,
        num_mtp_layers=0,
    )


NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.q_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_b.weight": "self_attn.q_b_proj.weight",
    "attention.kv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_b.weight": "self_attn.kv_b_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert.down.weight": "mlp.shared_experts.down_proj.weight",
}
GPT_OSS_NAMES = {
    "attention.out.bias": "self_attn.o_proj.bias",
    "attention.sinks.weight": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}
HALVES = {"mlp.gate_up.weight": "mlp.", "mlp.shared_expert.gate_up.weight": "mlp.shared_experts."}
OUTSIDE = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def _of_gpt_oss(model: Model, name: str, t: Tensor) -> dict[str, Tensor]:
    """What has names of its own there, or lies in another way: rows of gates and values in turn,
    matrices (in, out)."""
    assert model.moe is not None
    experts = model.moe.num_experts
    kind = name.rpartition(".")[2]
    if name.startswith("attention.qkv."):
        widths = [
            n * model.head_size for n in (model.num_attention_heads, *[model.query_groups] * 2)
        ]
        parts = zip("qkv", torch.split(t, widths), strict=True)
        return {f"self_attn.{part}_proj.{kind}": rows for part, rows in parts}
    if name.startswith("mlp.experts.gate_up."):
        halves_EIH2 = torch.stack(t.view(experts, 2, -1, *t.shape[1:]).unbind(1), 2)
        turns = halves_EIH2.flatten(1, 2)
        if kind == "bias":
            return {"mlp.experts.gate_up_proj_bias": turns}
        return {"mlp.experts.gate_up_proj": turns.mT}
    if name == "mlp.experts.down.weight":
        return {"mlp.experts.down_proj": t.view(experts, -1, t.shape[1])}
    if name == "mlp.experts.down.bias":
        return {"mlp.experts.down_proj_bias": t.view(experts, -1)}
    return {GPT_OSS_NAMES[name]: t} if name in GPT_OSS_NAMES else {}


def _in_a_layer(model: Model, name: str, t: Tensor) -> dict[str, Tensor]:
    """One tensor of a block under transformers' names, without the layer."""
    assert model.moe is not None
    experts = model.moe.num_experts
    if model.family == "gpt-oss" and (found := _of_gpt_oss(model, name, t)):
        return found
    if name in HALVES:
        gate, up = t.chunk(2)
        return {f"{HALVES[name]}gate_proj.weight": gate, f"{HALVES[name]}up_proj.weight": up}
    if name == "mlp.experts.gate_up.weight":
        return {"mlp.experts.gate_up_proj": t.view(experts, -1, t.shape[1])}
    if name == "mlp.experts.down.weight":
        return {"mlp.experts.down_proj": t.view(experts, -1, t.shape[1]).mT}
    return {NAMES[name]: t}


def in_their_layout(model: Model, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients under transformers' names: only moved."""
    moved = {}
    for full, t in ours.items():
        if full in OUTSIDE:
            moved[OUTSIDE[full]] = t
            continue
        _, number, name = full.split(".", 2)
        for theirs, part in _in_a_layer(model, name, t).items():
            moved[f"model.layers.{number}.{theirs}"] = part
    return moved


class HalfTables(WideRotary):
    """Without the second half of the tables, which is the first again."""

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        cos_SR, sin_SR = super().forward(x, position_ids, layer_type)
        return cos_SR.chunk(2, -1)[0], sin_SR.chunk(2, -1)[0]


@contextlib.contextmanager
def all_in(dtype: torch.dtype) -> Iterator[None]:
    """What asks for fp32 by torch's word gets `dtype`."""
    with mock.patch.object(torch, "float32", dtype):
        yield


def beside(model: Model, dtype: torch.dtype) -> tuple[Transformer, Any]:
    """Our model and transformers' with the same random weights; biases that choose are all below
    0, so that a score of 0 would be the best."""
    transformers = pytest.importorskip("transformers")
    ours = random_model(model, dtype).eval()
    for name, bias_E in ours.named_buffers():
        assert name.endswith(".expert_bias")
        bias_E.copy_(-3 + torch.rand(len(bias_E), generator=torch.Generator().manual_seed(4)))
    for name, p in ours.named_parameters():
        if dtype == torch.float64 and name.endswith("experts.gate_up.weight"):
            p.data *= 5  # some are beyond gpt-oss's limits; fp32 would round more
    kind = {"deepseek-v3": "DeepseekV3", "gpt-oss": "GptOss"}[model.family]
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config_of(model)).to(dtype).eval()
    if dtype == torch.float64:
        wide = HalfTables if model.family == "gpt-oss" else WideRotary
        theirs.model.rotary_emb = wide(model)
    weights = in_their_layout(model, {n: p.detach() for n, p in ours.state_dict().items()})
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= (set() if model.untied else {"lm_head.weight"})
    return ours, theirs


SHAPES = {"deepseek-v3": deepseek, "gpt-oss": gpt_oss}
