"""What the stage precompile has every distinct rank do: the calls of a step, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.layout_cases import layout, runs_here
from tests.train.plain_loop import VOCAB, job_of
from trainkit.base.errors import TrainkitError
from trainkit.train.parallel import expert_parallel
from trainkit.train.rehearsal.compile_worker import compile_ranks, compiling_ranks


def ranks_that_ran(model: str, folder: Path, ranks: int, how: dict[str, Any]) -> list[int]:
    """Those whose calls came to their end; without `compile`, which changes none of them."""
    job = job_of(model, ranks, folder, how, "mock")
    found = [each["rank"] for each in compile_ranks(job, VOCAB, folder, at_once=1)]
    assert found == compiling_ranks(job, VOCAB)
    return found


def test_a_stage_has_its_own_tokens_of_a_sample(tmp_path: Path) -> None:
    assert ranks_that_ran("llama", tmp_path, 4, layout(1, 2, cp=2)) == [0, 2]


def test_experts_are_where_the_trainer_has_them(tmp_path: Path) -> None:
    how = layout(2, sp=True, ep=2)
    if not runs_here(how, experts=True):
        pytest.skip(f"torch {torch.__version__} keeps no experts apart")
    assert ranks_that_ran("moe", tmp_path, 2, how) == [0, 1]
    sent = mock.patch.object(expert_parallel, "begin_exchange", side_effect=KeyError("rows"))
    with sent, pytest.raises(TrainkitError, match="KeyError: 'rows'"):
        ranks_that_ran("moe", tmp_path, 2, how)
