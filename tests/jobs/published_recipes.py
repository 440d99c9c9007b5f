"""Published learning rates, data, intervals and limits of the reference experiments, written out
once more, for tests/jobs/test_references.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What a family shares, or a size changes: nothing of it may come from a neighbour or a
    default by accident."""

    dropout: float
    std: float | None  # None: small_init and wang_init
    warmup: float  # steps; below 1: a fraction
    decay: int
    weight_decay: float
    beta2: float
    recompute: str
    sequence_parallel: bool
    zero: int
    dataset: str
    split: str


PILE, WIKIPEDIA, SLIM, WEBTEXT = (
    "the-pile-gpt3",
    "neuron-wikipedia",
    "slimpajama",
    "openwebtext-10k",
)


RECIPES: Mapping[str, Recipe] = {
    "gpt-neox-20b": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-20b-lambda": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-9b-lambda": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-2-7b": Recipe(
        0.0, None, 0.01, 320000, 0.1, 0.95, "full", False, 1, "enron", "969,30,1"
    ),
    "nemo-gpt3-126m": Recipe(
        0.1, 0.023, 636, 500000, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-5b": Recipe(0.1, 0.01, 115, 62500, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"),
    "nemo-gpt3-20b": Recipe(
        0.1, 0.008165, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-40b": Recipe(
        0.1, 0.007, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-175b": Recipe(
        0.1, 0.006, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-175b16": Recipe(
        0.1, 0.006, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-04b8": Recipe(0.1, 0.01, 115, 62500, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"),
    "neuron-gpt3-6-7b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "full", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-23b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "selective", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-46b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "full", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-175b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "selective", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "azure-gpt3-175b": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", True, 1, SLIM, "44,15,15"
    ),
    "azure-gpt3-check": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", False, 1, SLIM, "44,15,15"
    ),
    "azure-gpt3-857m": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", False, 1, SLIM, "44,15,15"
    ),
    "jean-zay-7-5b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-30b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-76b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-76b-pp30": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "llama-8b": Recipe(0.0, 0.02, 200, 1000, 0.1, 0.95, "selective", False, 3, "c4", "998,1,1"),
}


# (log, evaluate, batches of an evaluation, save, checkpoints kept)
INTERVALS: Mapping[str, tuple[int, int | None, int, int | None, int]] = {
    "gpt-neox-20b": (2, 1000, 10, 500, 2),
    "gpt-neox-20b-lambda": (2, 1000, 10, 500, 2),
    "gpt-neox-9b-lambda": (2, 1000, 10, 500, 2),
    "gpt-neox-2-7b": (100, 1000, 10, 10000, 4),
    "nemo-gpt3-126m": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-5b": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-20b": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-40b": (10, 2000, 20, 2000, 5),
    "nemo-gpt3-175b": (10, 2000, 20, 2000, 1),
    "nemo-gpt3-175b16": (10, 40, 20, 40, 1),
    "nemo-gpt3-04b8": (10, 40, 50, 40, 10),
    "azure-gpt3-175b": (10, 100, 10, 100, 2),
    "azure-gpt3-check": (10, 100, 10, 100, 2),
    "azure-gpt3-857m": (10, 100, 10, 100, 2),
    "llama-8b": (10, None, 10, 500, 2),
    **dict.fromkeys(
        ("neuron-gpt3-6-7b", "neuron-gpt3-23b", "neuron-gpt3-46b", "neuron-gpt3-175b"),
        (1, None, 1, None, 1),
    ),
    **dict.fromkeys(
        ("jean-zay-7-5b", "jean-zay-30b", "jean-zay-76b", "jean-zay-76b-pp30"),
        (10, 100, 10, 500, 2),
    ),
}


TIME_LIMITS = {
    "nemo-gpt3-126m": "1-00:00:00",
    "nemo-gpt3-5b": "6-00:00:00",
    "nemo-gpt3-20b": "7-00:00:00",
    "nemo-gpt3-40b": "6-12:00:00",
    "nemo-gpt3-175b": "26-00:00:00",
    "nemo-gpt3-175b16": "26-00:00:00",
    "nemo-gpt3-04b8": "00:30:00",
    **dict.fromkeys(
        ("jean-zay-7-5b", "jean-zay-30b", "jean-zay-76b", "jean-zay-76b-pp30"), "6:00:00"
    ),
}


LOSS_SCALES = {
    "gpt-neox-2-7b": 2.0**32,
    "azure": 2.0**32,
    "jean-zay": 2.0**32,
    "gpt-neox-20b": 2.0**12,
    "gpt-neox-9b": 2.0**12,
}
