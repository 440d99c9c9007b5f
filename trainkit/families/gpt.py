"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165): learned positions,
LayerNorm, biases, GELU, the head tied to the embedding.

Parameters: N = L(12H^2 + 13H) + VH + PH + 2H with F = 4H (Narayanan et al. 2021,
arXiv:2104.04473, eq. 2, and the final LayerNorm).
"""

from __future__ import annotations

import re

from trainkit.families.contract import (
    LAYER_NORM,
    ConfigKey,
    Family,
    HuggingFace,
    four_times,
)

GPT = Family(
    name="gpt",
    norm=LAYER_NORM,
    activation="gelu",
    bias=True,
    learned_positions=True,
    rotary_percent=0.0,
    parallel_residual=False,
    untied=False,
    gelu="tanh",
    ffn_width=four_times,
    settings=frozenset({"gelu"}),
    hugging_face=HuggingFace(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        outside={
            "embed_tokens": "transformer.wte",
            "embed_positions": "transformer.wpe",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        block="transformer.h.{}.",
        inside={
            "attention_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "mlp_norm": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
        },
        buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
        keys=(
            ConfigKey("n_layer", "num_layers", 12, "num_layers"),
            ConfigKey("n_embd", "hidden_size", 768, "hidden_size"),
            ConfigKey("n_head", "num_attention_heads", 12, "num_attention_heads"),
            ConfigKey(
                "n_inner",
                "ffn_width",
                setting="ffn_hidden_size",
                derived=lambda config: 4 * config.get("n_embd", 768),
            ),
            ConfigKey("n_positions", "positions", 1024, "max_position_embeddings"),
            ConfigKey("activation_function", "gelu_form", "gelu_new", "gelu"),
            ConfigKey("layer_norm_epsilon", "layernorm_epsilon", 1e-5, "layernorm_epsilon"),
            ConfigKey("tie_word_embeddings", "tied", True, "untie_embeddings_and_output_weights"),
            ConfigKey("scale_attn_weights", default=True),
            ConfigKey("scale_attn_by_inverse_layer_idx", default=False),
            ConfigKey("add_cross_attention", default=False),
        ),
        dropout={
            "resid_pdrop": "hidden_dropout",
            "embd_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
        },
        conv1d=True,
    ),
)
