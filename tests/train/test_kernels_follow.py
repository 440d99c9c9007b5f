"""Training with the fused kernels follows training with plain torch: the same samples, the same
steps, losses as near as rounding lets them be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ops.op_cases import fused
from tests.train.layout_cases import SMOOTH, layout
from tests.train.layouts import Case, run_worlds

# how far losses, and norms of gradients, are apart at most, relative: measured, times about ten
LIMITS = {"fp32": (1e-5, 1e-3), "bf16": (5e-3, 0.2)}


def apart(family: str, precision: str, steps: int, root: Path) -> tuple[float, float]:
    """The largest difference of losses and of gradient norms between the kernels."""
    fused()  # or it is skipped
    training: dict[str, Any] = {
        **SMOOTH,
        "train_iters": steps,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "lr": 1e-3,  # at a rate where losses jump, any rounding makes another run of it
        "precision": precision,
    }
    case = Case(family, layout(), 1, training, "fp32")
    cases = {"reference": case, "fused": replace(case, kernels="fused")}
    found = run_worlds(
        {1: {name: ("tests.train.layouts:train_case", (of, root)) for name, of in cases.items()}}
    )
    reference, other = (
        np.array([(step.loss, step.norm) for step in found[name][0]]) for name in cases
    )
    assert len(reference) == steps and np.ptp(reference[:, 1]) > 0
    loss, norm = np.abs(other / reference - 1).max(axis=0)
    return float(loss), float(norm)


def test_a_few_steps_follow_the_reference(tmp_path: Path) -> None:
    loss, norm = apart("llama", "fp32", 8, tmp_path)
    assert loss <= LIMITS["fp32"][0] and norm <= LIMITS["fp32"][1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("family", ["gpt", "neox", "llama"])
def test_200_steps_follow_the_reference(family: str, precision: str, tmp_path: Path) -> None:
    loss, norm = apart(family, precision, 200, tmp_path)
    print(family, precision, loss, norm)
    assert loss <= LIMITS[precision][0] and norm <= LIMITS[precision][1]
