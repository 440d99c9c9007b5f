"""Real trees of GPT-NeoX and Megatron-LM for tests, where the caller names them.

TRAINKIT_MEGATRON_SOURCE and TRAINKIT_NEOX_SOURCE name trees (several, separated by ":"),
TRAINKIT_MEGATRON_PYTHON and TRAINKIT_NEOX_PYTHON interpreters that have what they need.
TRAINKIT_FAKECUDA names a folder for PYTHONPATH whose sitecustomize.py lets them run without a GPU;
by default ../shared/lab/fakecuda beside the checkout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
VARIABLES = {"megatron-lm": "TRAINKIT_MEGATRON", "gpt-neox": "TRAINKIT_NEOX"}


@dataclass(frozen=True)
class RealEngine:
    """A tree that runs here.

    Args:
        engine: its name in jobs.toml.
        tree: its source.
        python: the interpreter that has what it needs.
        fakecuda: the folder of the stand-in for torch.cuda.
    """

    engine: str
    tree: Path
    python: str
    fakecuda: Path

    @property
    def environment(self) -> dict[str, str]:
        """What lets it run on CPUs."""
        common = {
            "PYTHONPATH": str(self.fakecuda),
            "FAKECUDA": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.engine == "megatron-lm":
            return {**common, "FAKECUDA_TYPES": "1"}
        return {**common, "DS_ACCELERATOR": "cpu"}


def real_engines(engine: str) -> list[RealEngine]:
    """The trees of an engine that are named; none where there are none."""
    prefix = VARIABLES[engine]
    trees = os.environ.get(f"{prefix}_SOURCE", "")
    fakecuda = Path(
        os.environ.get("TRAINKIT_FAKECUDA", CHECKOUT.parent / "shared" / "lab" / "fakecuda")
    )
    python = os.environ.get(f"{prefix}_PYTHON", "")
    if not trees or not python or not (fakecuda / "sitecustomize.py").is_file():
        return []
    return [RealEngine(engine, Path(tree), python, fakecuda) for tree in trees.split(":")]


def parameters(engine: str) -> list[object]:
    """Parameters for a test of every named tree; one that is skipped, and says why, where none
    is."""
    found = real_engines(engine)
    if found:
        return [pytest.param(each, id=f"{engine}-{each.tree.name}") for each in found]
    prefix = VARIABLES[engine]
    why = f"no tree of {engine}: {prefix}_SOURCE, {prefix}_PYTHON and a stand-in for torch.cuda"
    return [pytest.param(None, id=engine, marks=pytest.mark.skip(reason=why))]
