"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437; V3.1, R1 and Kimi K2 are of it, too): Llama
whose attention is by latents and whose MLPs, but in the first layers, are experts: sigmoids of the
router, experts of the best groups, a bias that only chooses, an expert that every token takes.

Parameters: N = L(H(C + R) + C + CA(N + U) + AUH + q + 2H) + M(3HF) + (L - M)(E(3HI + H) + 3HS)
+ 2VH + H, with q = HC' + C' + C'A(N + R), or HA(N + R) without a latent of queries; C' and C the
widths of the latents of queries and of keys and values, A heads, N, R and U channels of a head, M
layers without experts, E experts of width I, S the width of the one for all. A bias of E numbers
in each layer with experts is no parameter. The module that predicts one token more (section 2.2) is
not built: the published files' layer after the last is left out.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.families.contract import Routing
from trainkit.families.llama import EXPERT_SETTINGS, LLAMA

DEEPSEEK_V3 = replace(
    LLAMA,
    name="deepseek-v3",
    settings=(LLAMA.settings - {"num_query_groups", "sliding_rotary_base"})
    | EXPERT_SETTINGS
    | {"mla"},
    routing=Routing(score="sigmoid", expert_bias=True, wide=True),
)
