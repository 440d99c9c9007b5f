"""gpt-oss (OpenAI 2025, arXiv:2508.10925): Llama with a sink in each head's softmax, biases in
attention, windows in every other layer from the first, and experts with biases, whose gates and
values are kept within limits; a router with a bias.

Parameters: N = L(2HQ + 2HK + Q + 2K + H + A + E(3HI + H + 2I + H + 1) + 2H) + 2VH + H, with A
heads, E experts of width I.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import Routing
from trainkit.families.llama import EXPERT_SETTINGS, LLAMA

GPT_OSS = replace(
    LLAMA,
    name="gpt-oss",
    settings=LLAMA.settings | EXPERT_SETTINGS,
    rotary_base=150000.0,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    sliding_window_pattern=2,
    routing=Routing(pre_softmax=False, bias=True, clamped=True),
)
