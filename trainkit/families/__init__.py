"""Families of models, one file each. A new one is a file here, a line of FAMILIES, and its name in
`Model.family` (trainkit/jobs/models.py)."""

from __future__ import annotations

from trainkit.families.contract import Family
from trainkit.families.gpt import GPT
from trainkit.families.gpt_neox import GPT_NEOX
from trainkit.families.llama import LLAMA

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT, GPT_NEOX, LLAMA)}
