"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745): part of each head's channels turn
with the position, attention and MLP side by side, LayerNorm, biases, GELU, a head of its own.

Parameters: N = L(12H^2 + 13H) + 2VH + 2H with F = 4H; with gpt_j_tied one norm, 2H, less a layer.
"""

from __future__ import annotations

import re

from trainkit.families.contract import (
    LAYER_NORM,
    ConfigKey,
    Family,
    HuggingFace,
    RotaryKeys,
    four_times,
)

GPT_NEOX = Family(
    name="gpt-neox",
    norm=LAYER_NORM,
    activation="gelu",
    bias=True,
    learned_positions=False,
    rotary_percent=0.25,
    parallel_residual=True,
    untied=True,
    gelu="exact",
    ffn_width=four_times,
    settings=frozenset(
        {
            "rotary_percent",
            "rotary_base",
            "sliding_rotary_base",
            "gpt_j_residual",
            "gpt_j_tied",
            "gelu",
        }
    ),
    hugging_face=HuggingFace(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        prefix="gpt_neox.",
        outside={
            "embed_tokens": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        block="gpt_neox.layers.{}.",
        inside={
            "attention_norm": ("input_layernorm",),
            "attention.qkv": ("attention.query_key_value",),
            "attention.out": ("attention.dense",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.up": ("mlp.dense_h_to_4h",),
            "mlp.down": ("mlp.dense_4h_to_h",),
        },
        buffers=re.compile(
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
            r"|gpt_neox\.rotary_emb\.inv_freq"
        ),
        keys=(
            ConfigKey("num_hidden_layers", "num_layers", 44, "num_layers"),
            ConfigKey("hidden_size", "hidden_size", 6144, "hidden_size"),
            ConfigKey("num_attention_heads", "num_attention_heads", 64, "num_attention_heads"),
            ConfigKey("intermediate_size", "ffn_width", 24576, "ffn_hidden_size"),
            ConfigKey("hidden_act", "gelu_form", "gelu", "gelu"),
            ConfigKey("layer_norm_eps", "layernorm_epsilon", 1e-5, "layernorm_epsilon"),
            ConfigKey("use_parallel_residual", "parallel_residual", True, "gpt_j_residual"),
            ConfigKey("tie_word_embeddings", "tied", False, "untie_embeddings_and_output_weights"),
            ConfigKey("attention_bias", default=True),
        ),
        dropout={
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        rotary=RotaryKeys(theta="rotary_emb_base", fraction="rotary_pct"),
        by_head=True,
    ),
)
