"""Who reads the lines and checkpoints of each foreign engine, by its name in jobs.toml."""

from __future__ import annotations

from trainkit.engines.rank import (
    gpt_neox,
    megatron_bridge,
    megatron_lm,
    nemo,
    neuronx_nemo,
    torchtitan,
)
from trainkit.engines.rank.nemo_lines import NemoLines
from trainkit.engines.rank.readings import EngineReader, LineReader, Reading
from trainkit.engines.rank.spec import RankSpec

READERS: dict[str, EngineReader] = {
    "megatron-lm": megatron_lm,
    "megatron-bridge": megatron_bridge,
    "gpt-neox": gpt_neox,
    "nemo": nemo,
    "neuronx-nemo": neuronx_nemo,
    "torchtitan": torchtitan,
}
# whose lines say less than what the lines before them make of them
_BARS = ("nemo", "neuronx-nemo")


def line_reader(spec: RankSpec) -> LineReader:
    """What reads the lines of one process of the engine, from its first to its last."""
    if spec.engine in _BARS:
        return NemoLines(spec).read
    reader = READERS[spec.engine]

    def read(text: str) -> list[Reading]:
        reading = reader.read_line(text)
        return [] if reading is None else [reading]

    return read
