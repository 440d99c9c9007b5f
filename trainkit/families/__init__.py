"""Families of models, one file each. A new one is a file here, a line of FAMILIES, and its name in
`Model.family` (trainkit/jobs/models.py)."""

from __future__ import annotations

from trainkit.families.contract import Family
from trainkit.families.deepseek_v3 import DEEPSEEK_V3
from trainkit.families.gemma3 import GEMMA3
from trainkit.families.gpt import GPT
from trainkit.families.gpt_neox import GPT_NEOX
from trainkit.families.gpt_oss import GPT_OSS
from trainkit.families.llama import LLAMA
from trainkit.families.mistral import MISTRAL
from trainkit.families.mixtral import MIXTRAL
from trainkit.families.olmo import OLMO2, OLMO3
from trainkit.families.olmoe import OLMOE
from trainkit.families.qwen2 import QWEN2
from trainkit.families.qwen3 import QWEN3
from trainkit.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(GPT, GPT_NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA3),
        *(MIXTRAL, OLMOE, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS),
    )
}
