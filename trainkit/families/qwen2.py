"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases of queries, keys and
values.

Parameters: Llama's and L(H + 2K).
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, WindowKeys
from trainkit.families.llama import LLAMA, shape_keys

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    rotary_base=1e6,
    qkv_bias=True,
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        keys=(*shape_keys(groups=32, width=22016), ConfigKey("hidden_act", default="silu")),
        windows=WindowKeys(4096, switched=True),
    ),
)
