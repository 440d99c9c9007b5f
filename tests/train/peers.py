"""transformers' models beside ours: the same shape, the same weights in its layout, and its fp32
islands widened for comparisons in fp64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.jobs.schema import Model, RopeScaling
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.transformer import Transformer

VOCAB = 97  # a prime: padding is always at work
POSITIONS = 24
# of four frequencies one stays, one is mixed, two are divided
LLAMA3 = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=64)


def _gpt(**changes: Any) -> Model:
    return Model(
        **{
            "family": "gpt",
            "num_layers": 2,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "seq_length": POSITIONS,
            **changes,
        }
    )


def _neox(**changes: Any) -> Model:
    return Model(
        **{
            "family": "gpt-neox",
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "seq_length": POSITIONS,
            **changes,
        }
    )


def _llama(**changes: Any) -> Model:
    return Model(
        **{
            "family": "llama",
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "seq_length": POSITIONS,
            **changes,
        }
    )


CASES: dict[str, Model] = {
    "gpt": _gpt(),
    "gpt-untied": _gpt(untie_embeddings_and_output_weights=True),
    "gpt-exact-gelu": _gpt(gelu="exact", ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "gpt-more-positions": _gpt(max_position_embeddings=40),
    "neox": _neox(),
    "neox-tied": _neox(untie_embeddings_and_output_weights=False),
    "neox-rotary-all": _neox(rotary_percent=1.0, rotary_base=500.0),
    "neox-rotary-rounded-down": _neox(rotary_percent=0.4),  # 6.4 of 16 channels
    "neox-tanh": _neox(gelu="tanh", ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "neox-sequential": _neox(gpt_j_residual=False),
    "neox-one-norm": _neox(gpt_j_tied=True),
    "llama": _llama(),
    "llama-tied": _llama(untie_embeddings_and_output_weights=False),
    "llama-3-groups": _llama(num_query_groups=3, rotary_base=500000.0),
    "llama-2-groups": _llama(num_query_groups=2, ffn_hidden_size=50, layernorm_epsilon=1e-2),
    "llama-1-group": _llama(num_query_groups=1),
    "llama-wide-heads": _llama(num_query_groups=2, kv_channels=10),
    "llama-linear": _llama(
        rope_scaling=RopeScaling(type="linear", factor=4.0), max_position_embeddings=40
    ),
    "llama-3.1": _llama(num_query_groups=2, rope_scaling=LLAMA3, max_position_embeddings=72),
    "llama-3.1-tied": _llama(
        rope_scaling=LLAMA3,
        rotary_base=500000.0,
        untie_embeddings_and_output_weights=False,
        max_position_embeddings=72,
    ),
}
ONE_OF_EACH = ("gpt", "neox", "llama-3-groups")


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
                parameter.copy_(1 + 0.3 * noise)
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
    shared = {
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
    theta = model.rotary_base or 10000.0
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
            include={"factor"} if model.rope_scaling.type == "linear" else None, exclude={"type"}
        )
        scaling["rope_type"] = model.rope_scaling.type
    heads = {"num_key_value_heads": model.query_groups, "head_dim": model.head_size}
    return transformers.LlamaConfig(
        **shared,
        **heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=model.layernorm_epsilon,
    )


class WideRMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) in the input's dtype; transformers' is
    fp32 always."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = replaced.weight, replaced.variance_epsilon

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = self.weight * (
            x_BSH * (x_BSH.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        )
        return y_BSH


class WideRotary(nn.Module):
    """Tables of rotary positions from fp64 angles, in the input's dtype; transformers' are from
    fp32 angles."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def frequency(self, pair: int) -> float:
        """Radians a token; the stretching told in wavelengths, as Llama 3.1's authors and
        transformers do."""
        scaling, theta = self.model.rope_scaling, self.model.rotary_base or 10000.0
        plain: float = 1 / theta ** (2 * pair / self.model.rotary_channels)
        if scaling is None or scaling.type == "linear":
            return plain / (scaling.factor if scaling else 1)
        original, wavelength = scaling.original_max_position_embeddings, 2 * math.pi / plain
        if wavelength < original / scaling.high_freq_factor:
            return plain
        if wavelength > original / scaling.low_freq_factor:
            return plain / scaling.factor
        smooth = (original / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * plain / scaling.factor + smooth * plain

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = torch.tensor(
            [self.frequency(i) for i in range(self.model.rotary_channels // 2)], dtype=torch.float64
        ).repeat(2)
        angles = position_ids[..., None].double() * frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def transformers_model(model: Model, dtype: torch.dtype, *, widened: bool = False) -> Any:
    """transformers' model of the shape, in eval mode. `widened`: its norms and rotary tables
    compute in the input's dtype."""
    transformers = pytest.importorskip("transformers")
    kind = {
        "gpt": "GPT2LMHeadModel",
        "gpt-neox": "GPTNeoXForCausalLM",
        "llama": "LlamaForCausalLM",
    }[model.family]
    theirs = getattr(transformers, kind)(config_of(model)).to(dtype).eval()
    if widened:
        for parent in list(theirs.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(parent, name, WideRMSNorm(child))
                elif type(child).__name__ in ("LlamaRotaryEmbedding", "GPTNeoXRotaryEmbedding"):
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
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
}
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
    return {f"{LLAMA_NAMES[name]}.{kind}": t}


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
    base, outside, layers = OUTSIDE[model.family]
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


def beside(name: str, dtype: torch.dtype) -> tuple[Model, Transformer, Any]:
    """A case's shape, our model and transformers' with the same random weights; widened in fp64."""
    model = CASES[name]
    ours, theirs = (
        random_model(model, dtype).eval(),
        transformers_model(model, dtype, widened=dtype == torch.float64),
    )
    weights = in_their_layout(model, {n: p.detach() for n, p in ours.named_parameters()}, theirs)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= (set() if model.untied else {head_name(theirs)})
    return model, ours, theirs
