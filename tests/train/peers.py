"""transformers' models beside ours: the same shape, the same weights in its layout, and its fp32
islands widened for comparisons in fp64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.peer_shapes import CASES, VOCAB
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.transformer import Transformer


def random_model(
    model: Model, dtype: torch.dtype = torch.float32, seed: int = 0, vocab: int = VOCAB
) -> Transformer:
    """Our model with every parameter random, biases and norms too, and logits of about 1: no
    zero and no one hides anything. The same values in every dtype."""
    ours = Transformer(model, vocab)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 - model.architecture.norm.offset + 0.3 * noise)
            elif name.endswith("experts.down.weight"):  # stored (in, out)
                assert model.moe is not None
                parameter.copy_(noise * model.moe.ffn_hidden_size**-0.5)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return ours.to(dtype)


def random_tokens(batch: int, length: int, seed: int = 1, vocab: int = VOCAB) -> Tensor:
    """(B, S) ids."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def documents_of(*bounds: int) -> DocumentBounds:
    """Documents that begin at all `bounds` but the last, which is B * S."""
    return DocumentBounds(
        bounds,
        torch.tensor(bounds, dtype=torch.int32),
        max(end - start for start, end in pairwise(bounds)),
    )


def config_of(model: Model) -> Any:
    """transformers' configuration of the shape, in words that versions 4 and 5 both know."""
    transformers = pytest.importorskip("transformers")
    shared: dict[str, object] = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": not model.untied,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    gelu = {
        "tanh": "gelu_new",
        "exact": "gelu",
        None: "gelu_new" if model.family == "gpt" else "gelu",
    }[model.gelu]
    if model.family == "gpt":
        sizes = {
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_width,
        }
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        rest = {
            "n_positions": model.positions,
            "layer_norm_epsilon": model.layernorm_epsilon,
            "activation_function": gelu,
        }
        return transformers.GPT2Config(**shared, **sizes, **dropout, **rest)
    shared |= {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
    }
    shared |= {"intermediate_size": model.ffn_width, "max_position_embeddings": model.positions}
    theta = model.theta
    if model.family == "gpt-neox":
        rotary = {"rotary_pct": model.rotary_percent or 0.25, "rotary_emb_base": theta}
        rest = {
            "layer_norm_eps": model.layernorm_epsilon,
            "use_parallel_residual": model.parallel_residual,
            "hidden_act": gelu,
        }
        return transformers.GPTNeoXConfig(**shared, **rotary, **rest)
    scaling = None
    if model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump(
            include={
                "linear": {"factor"},
                "llama3": {
                    "factor",
                    "low_freq_factor",
                    "high_freq_factor",
                    "original_max_position_embeddings",
                },
                "yarn": {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"},
            }[model.rope_scaling.type]
        )
        scaling["rope_type"] = model.rope_scaling.type
    heads = {"num_key_value_heads": model.query_groups, "head_dim": model.head_size}
    shared |= heads | {"rms_norm_eps": model.layernorm_epsilon, "pad_token_id": None}
    shared |= {"rope_theta": theta, "rope_scaling": scaling}
    if model.sliding_window is not None or model.family == "mistral":
        shared["sliding_window"] = model.sliding_window
    if model.family in ("olmo3", "gemma3"):
        pattern = model.sliding_window_pattern or {"olmo3": 4, "gemma3": 6}[model.family]
        shared["layer_types"] = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(model.num_layers)
        ]
    if model.family == "olmo3":
        sliding = {"rope_type": "default", "rope_theta": theta}
        full = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
        shared["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        del shared["rope_scaling"]
    if model.family == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": model.sliding_theta}
        full = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
        shared["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        del shared["rope_scaling"]
        shared["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_size
    if model.moe is not None:
        shared |= experts_of(model)
    return getattr(transformers, f"{THEIRS[model.family]}Config")(**shared)


def experts_of(model: Model) -> dict[str, object]:
    """Experts in transformers' words. Its usual products of many experts know no fp64."""
    moe = model.moe
    assert moe is not None
    words: dict[str, object] = {
        "num_experts_per_tok": moe.router_topk,
        "norm_topk_prob": model.routing.normalized,
        "experts_implementation": "eager",
    }
    if model.family == "mixtral":
        return words | {
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.ffn_hidden_size,
        }
    words["num_experts"] = moe.num_experts
    if model.family == "olmoe":
        return words | {"intermediate_size": moe.ffn_hidden_size}
    return words | {
        "moe_intermediate_size": moe.ffn_hidden_size,
        "mlp_only_layers": list(range(moe.first_dense_layers)),
        "use_sliding_window": model.sliding_window is not None,
    }


# what transformers' classes of a family begin with
THEIRS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "gemma3": "Gemma3Text",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen3-moe": "Qwen3Moe",
}


class WideRMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) in the input's dtype; transformers' is
    fp32 always."""

    def __init__(self, replaced: Any, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = replaced.weight, offset
        self.epsilon = getattr(replaced, "variance_epsilon", None) or replaced.eps

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = (self.offset + self.weight) * (
            x_BSH * (x_BSH.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        )
        return y_BSH


class WideRouter(nn.Module):
    """A router in the input's dtype, its softmax too; transformers' is fp32 always."""

    def __init__(self, replaced: Any, model: Model) -> None:
        super().__init__()
        self.weight, self.chosen = replaced.weight, replaced.top_k
        self.normalized = model.routing.normalized

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = x_TH @ self.weight.T
        weights_TK, experts_TK = logits_TE.softmax(-1).topk(self.chosen)
        if self.normalized:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, experts_TK


class WideRotary(nn.Module):
    """Tables of rotary positions from fp64 angles, in the input's dtype; transformers' are from
    fp32 angles."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def frequency(self, pair: int, *, sliding: bool = False) -> float:
        """Radians a token; the stretching told in wavelengths, as Llama 3.1's authors and
        transformers do."""
        scaling, theta = self.model.rope_scaling, self.model.theta
        if sliding:
            scaling, theta = None, self.model.sliding_theta
        plain: float = 1 / theta ** (2 * pair / self.model.rotary_channels)
        if scaling is None or scaling.type == "linear":
            return plain / (scaling.factor if scaling else 1)
        if scaling.type == "yarn":
            return self.yarn(pair, plain, scaling)
        original, wavelength = scaling.original_max_position_embeddings, 2 * math.pi / plain
        if wavelength < original / scaling.high_freq_factor:
            return plain
        if wavelength > original / scaling.low_freq_factor:
            return plain / scaling.factor
        smooth = (original / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * plain / scaling.factor + smooth * plain

    def yarn(self, pair: int, plain: float, scaling: RopeScaling) -> float:
        """As the paper says it: by the turns in the original length, whole numbers of pairs."""
        channels, theta = self.model.rotary_channels, self.model.theta
        where = [
            channels
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        if scaling.truncate:
            where = [math.floor(where[0]), math.ceil(where[1])]
        low, high = max(0, where[0]), min(channels - 1, where[1])
        share = min(1.0, max(0.0, (pair - low) / (high - low)))
        return plain * (1 - share) + plain / scaling.factor * share

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        sliding = layer_type == "sliding_attention"
        frequencies = torch.tensor(
            [self.frequency(i, sliding=sliding) for i in range(self.model.rotary_channels // 2)],
            dtype=torch.float64,
        ).repeat(2)
        angles = position_ids[..., None].double() * frequencies
        scaling = self.model.rope_scaling
        factor = 1.0
        if scaling is not None and scaling.type == "yarn" and not sliding:
            over, under = scaling.mscale or 1, scaling.mscale_all_dim or 0
            factor, least = (0.1 * m * math.log(scaling.factor) + 1 for m in (over, under))
            factor /= least
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


def transformers_model(model: Model, dtype: torch.dtype, *, widened: bool = False) -> Any:
    """transformers' model of the shape, in eval mode. `widened`: its norms and rotary tables
    compute in the input's dtype."""
    transformers = pytest.importorskip("transformers")
    kind = {
        "gpt": "GPT2LMHeadModel",
        "gpt-neox": "GPTNeoXForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }.get(model.family) or f"{THEIRS[model.family]}ForCausalLM"
    theirs = getattr(transformers, kind)(config_of(model)).to(dtype).eval()
    if widened:
        for parent in list(theirs.modules()):
            if hasattr(parent, "embed_scale"):  # an fp32 number
                parent.embed_scale = torch.tensor(math.sqrt(model.hidden_size), dtype=dtype)
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(parent, name, WideRMSNorm(child, model.architecture.norm.offset))
                elif type(child).__name__.endswith("TopKRouter"):
                    setattr(parent, name, WideRouter(child, model))
                elif type(child).__name__.endswith("RotaryEmbedding"):
                    setattr(parent, name, WideRotary(model))
    return theirs


GPT_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
NEOX_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "post_mlp_norm": "post_feedforward_layernorm",
}
GEMMA3_NAMES = LLAMA_NAMES | {"mlp_norm": "pre_feedforward_layernorm"}
OUTSIDE = {
    "gpt": (
        "transformer",
        {"embed_tokens": "wte", "embed_positions": "wpe", "final_norm": "ln_f"},
        "h",
    ),
    "gpt-neox": (
        "gpt_neox",
        {"embed_tokens": "embed_in", "final_norm": "final_layer_norm"},
        "layers",
    ),
    "llama": ("model", {"embed_tokens": "embed_tokens", "final_norm": "norm"}, "layers"),
}


def _in_a_layer(model: Model, name: str, kind: str, t: Tensor) -> dict[str, Tensor]:
    """One tensor of a block as transformers has it: name without the layer, several where it is
    split there."""
    if model.family == "gpt":
        return {f"{GPT_NAMES[name]}.{kind}": t.T if t.dim() == 2 else t}  # Conv1D is (in, out)
    if model.family == "gpt-neox":
        if name == "attention.qkv":  # there every head has its query, key and value together
            t = (
                t.reshape(3, model.num_attention_heads, model.head_size, *t.shape[1:])
                .transpose(0, 1)
                .flatten(0, 2)
            )
        found = {f"{NEOX_NAMES[name]}.{kind}": t}
        return found | (
            {f"post_attention_layernorm.{kind}": t}
            if model.gpt_j_tied and name == "attention_norm"
            else {}
        )
    if name == "attention.qkv":
        widths = [
            heads * model.head_size
            for heads in (model.num_attention_heads, model.query_groups, model.query_groups)
        ]
        return {
            f"self_attn.{part}_proj.{kind}": rows
            for part, rows in zip("qkv", torch.split(t, widths), strict=True)
        }
    if name == "mlp.gate_up":
        return {
            f"mlp.{part}_proj.{kind}": rows
            for part, rows in zip(("gate", "up"), t.chunk(2), strict=True)
        }
    if name.startswith("mlp.experts."):
        assert model.moe is not None
        by_expert = t.view(model.moe.num_experts, -1, model.hidden_size)
        if name == "mlp.experts.down":
            return {"mlp.experts.down_proj": by_expert.transpose(1, 2)}
        return {"mlp.experts.gate_up_proj": by_expert}
    names = GEMMA3_NAMES if model.family == "gemma3" else LLAMA_NAMES
    return {f"{names[name]}.{kind}": t}


def head_name(theirs: Any) -> str:
    """What transformers' versions call the head's weight."""
    return next(
        f"{name}.weight"
        for name, module in theirs.named_modules()
        if module is theirs.get_output_embeddings()
    )


def in_their_layout(model: Model, ours: dict[str, Tensor], theirs: Any) -> dict[str, Tensor]:
    """Weights or gradients under transformers' names and in its layout: only moved, never
    summed."""
    base, outside, layers = OUTSIDE.get(model.family, OUTSIDE["llama"])
    moved: dict[str, Tensor] = {}
    for full, t in ours.items():
        name, _, kind = full.rpartition(".")
        if name == "head":
            moved[head_name(theirs)] = t
        elif name in outside:
            moved[f"{base}.{outside[name]}.{kind}"] = t
        else:
            _, number, inside = name.split(".", 2)
            moved |= {
                f"{base}.{layers}.{number}.{n}": part
                for n, part in _in_a_layer(model, inside, kind, t).items()
            }
    return moved


def beside(case: str | Model, dtype: torch.dtype) -> tuple[Model, Transformer, Any]:
    """A case's shape, our model and transformers' with the same random weights; widened in fp64."""
    model = CASES[case] if isinstance(case, str) else case
    ours, theirs = (
        random_model(model, dtype).eval(),
        transformers_model(model, dtype, widened=dtype == torch.float64),
    )
    weights = in_their_layout(model, {n: p.detach() for n, p in ours.named_parameters()}, theirs)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= (set() if model.untied else {head_name(theirs)})
    return model, ours, theirs
