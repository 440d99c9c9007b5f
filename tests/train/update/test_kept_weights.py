"""One rank keeps the weights that it computes with, and the fused update writes them: the bits are
those of weights that are cast anew for each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.op_cases import fused
from tests.train.layout_cases import layout
from tests.train.layouts import Case, rank_of_world, run_worlds, take_steps
from tests.train.plain_loop import sizes_of
from trainkit.train.torch_compat import local_part


def steps_of(case: Case, root: Path, how: str) -> tuple[list[Any], bool]:
    """What each step was; whether the model's weights are the rounded ones at the end."""
    with rank_of_world(case, root) as rank:
        step = rank.step
        assert step.keeps
        step.keeps = how != "cast anew"
        values = []
        for size in sizes_of(rank.job):
            values += take_steps(rank, [size])
            if how == "let go":  # as after an evaluation
                step.model_parts.release()
        if how != "kept":
            return values, True
        same = all(
            torch.equal(weight, local_part(step.parameters[name]).to(weight.dtype))
            for name, weight in step.model_parts.modules[0].named_parameters()
        )
        return values, same and any(
            weight is not step.parameters[name]
            for name, weight in step.model_parts.modules[0].named_parameters()
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_kept_weights_are_those_cast_anew(
    tmp_path: Path, precision: str, micro_batch_size: int
) -> None:
    fused()  # or it is skipped
    training = {
        "train_iters": 4,
        "global_batch_size": 4,
        "micro_batch_size": micro_batch_size,
        "precision": precision,
        "initial_loss_scale": 2.0**10,
    }
    case = replace(Case("gpt", layout(), 1, training, "fp32"), kernels="fused")
    found = run_worlds(
        {
            1: {
                how: ("tests.train.update.test_kept_weights:steps_of", (case, tmp_path, how))
                for how in ("kept", "let go", "cast anew")
            }
        }
    )
    (kept, same), (let_go, _), (cast, _) = (found[how][0] for how in found)
    assert same and kept == let_go == cast
