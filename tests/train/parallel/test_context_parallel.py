"""Context parallelism beside training: the loss of an evaluation, and random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.layout_cases import layout
from tests.train.layouts import Case, rank_of_world, run_worlds


def evaluated(case: Case, root: Path) -> list[float]:
    """(cross-entropy, tokens) of a global batch over all ranks, and what this rank's random
    numbers began with in a step."""
    with rank_of_world(case, root) as rank:
        rank.parts.train(False)
        sums = rank.step.evaluate(rank.feed.read(0, 8))
        dist.all_reduce(sums)
        rank.parts.train()
        rank.step.random = True
        rank.step.backward(rank.feed.read(0, 8), 8)
        return [*sums.tolist(), float(torch.initial_seed())]


def test_an_evaluation_is_that_of_data_parallel_ranks(tmp_path: Path) -> None:
    layouts = {"ring": layout(cp=2), "heads": layout(cp=2, comm="a2a"), "apart": layout()}
    found = run_worlds(
        {
            2: {
                name: (
                    "tests.train.parallel.test_context_parallel:evaluated",
                    (Case("gemma3", keys, 2), tmp_path),
                )
                for name, keys in layouts.items()
            }
        }
    )
    ring, heads, apart = (found[name][0] for name in layouts)
    assert ring[0] == pytest.approx(apart[0], rel=1e-12)
    assert heads[0] == pytest.approx(apart[0], rel=1e-12)
    assert ring[1] == heads[1] == apart[1] == 8 * 16
    # ranks that have other tokens of the same samples drop by other numbers
    assert found["ring"][0][2] != found["ring"][1][2]
