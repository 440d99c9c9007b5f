"""Who reads the lines and checkpoints of each foreign engine, by its name in jobs.toml."""

from __future__ import annotations

from trainkit.engines.rank import gpt_neox, megatron_lm
from trainkit.engines.rank.contract import EngineReader

READERS: dict[str, EngineReader] = {"megatron-lm": megatron_lm, "gpt-neox": gpt_neox}
