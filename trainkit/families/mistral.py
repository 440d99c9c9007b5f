"""Mistral 7B (Jiang et al. 2023, arXiv:2310.06825): Llama, where every layer may have a window.

Parameters: as Llama's.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import ConfigKey, WindowKeys
from trainkit.families.llama import LLAMA, shape_keys

MISTRAL = replace(
    LLAMA,
    name="mistral",
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="mistral",
        architecture="MistralForCausalLM",
        keys=(*shape_keys(groups=8, width=14336), ConfigKey("hidden_act", default="silu")),
        windows=WindowKeys(4096, by_layer=False),
    ),
)
