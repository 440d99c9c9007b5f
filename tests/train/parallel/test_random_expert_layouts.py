"""Models with experts in random layouts against a plain loop over one process: ten steps, with
losses, norms, every gradient and the loads of all experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.layout_cases import (
    COMPILE,
    EXACT,
    FULL,
    MUON,
    SELECTIVE,
    layout,
    named,
    runs_here,
    words,
)
from tests.train.layouts import Case, compare
from tests.train.plain_loop import APART, MASKS
from trainkit.plan.checks import layout_objections
from trainkit.plan.rules import NATIVE

RANKS = {2: 4, 3: 1, 4: 9, 6: 1, 8: 6}  # of a world, and how often
SCHEDULES = ("", "", "1f1b", "interleaved", "zbv")  # "": one stage
# the last is not for ZBV
RECOMPUTED: list[dict[str, Any]] = [{}, FULL, {**FULL, "recompute_every": 2}, SELECTIVE]


def _split_samples(dice: random.Random) -> dict[str, Any]:
    return {"cp": dice.choice((2, 2, 4)), "comm": dice.choice(("p2p", "a2a"))}


def _drawn(dice: random.Random, ranks: int, schedule: str, *, context: bool) -> Case:
    """Any cell; most cannot be. `context`: with samples that are split."""
    tensor, zero = dice.choice((1, 2, 4)), dice.choice((0, 1, 1, 2, 3, 3))
    parallelism = layout(
        tensor,
        dice.choice((2, 2, 3, 4)) if schedule else 1,
        schedule or "1f1b",
        sp=tensor > 1 and dice.random() < 0.5,
        zero=zero,
        copies=dice.choice((1, 1, 1, 2, 2, 4)) if zero else 1,
        **(_split_samples(dice) if context else {}),
    )
    parallelism["expert_model_parallel_size"] = dice.choice((1, 2, 2, 4, 8))
    if split := dice.choice((0, 1, 1, 2, 3, 4)):  # 0: as many as of the rest
        parallelism["expert_tensor_parallel_size"] = split
    data = dice.choice(("mock", "mock", "documents", *MASKS))
    training = {
        "micro_batch_size": dice.choice((1, 2)),
        # MASKS are of four samples
        "global_batch_size": 12 if ranks % 3 == 0 else dice.choice((4, 4, 8)),
        **dice.choice(RECOMPUTED[: 3 if schedule == "zbv" else 4]),
        **dice.choice(({}, MUON)),
        **(APART if data == "documents" else {}),
    }
    models = ("moe", "moe-biased", *(("deepseek", "gpt-oss") if context else ()))
    return Case(dice.choice(models), parallelism, ranks, training, data=data)


def _can_be(case: Case) -> bool:
    """The plan takes it, and experts lie or route otherwise than in one process."""
    p = case.parallelism
    tensor, pipeline = p["tensor_model_parallel_size"], p["pipeline_model_parallel_size"]
    context = p.get("context_parallel_size", 1)
    experts = p["expert_model_parallel_size"] * p.get("expert_tensor_parallel_size", 1)
    if tensor * context * experts == 1 or case.ranks % (tensor * context * pipeline):
        return False
    return not list(layout_objections(case.job(Path()), NATIVE))


def _all(seed: int, *, context: bool) -> Iterator[tuple[str, Case]]:
    dice = random.Random(seed)
    while True:
        ranks = dice.choices([*RANKS], [*RANKS.values()])[0]
        schedule = dice.choice(SCHEDULES)
        for case in (_drawn(dice, ranks, schedule, context=context) for _ in range(200)):
            if _can_be(case):
                yield f"{words(case)}, {case.training['global_batch_size']} samples", case
                break


def cells(number: int, seed: int, *, context: bool = False) -> dict[str, Case]:
    """So many that train, by their place and words; `context`: all with samples that are split."""
    found = islice(_all(seed, context=context), number)
    return {f"{i}: {name}": case for i, (name, case) in enumerate(found)}


CELLS, SPLIT, SEED = 300, 60, 20  # SPLIT: with context parallelism
TOGETHER = 10  # cells of one world
WORLDS = 40  # that these make: drawn when one is run, not when tests are listed


@cache
def _worlds() -> list[dict[str, Case]]:
    """Cells of one number of ranks, which share processes."""
    found = []
    for drawn in (cells(CELLS, SEED), cells(SPLIT, SEED, context=True)):
        by_ranks = sorted(drawn.items(), key=lambda each: each[1].ranks)
        for _, of_ranks in groupby(by_ranks, key=lambda each: each[1].ranks):
            listed = list(of_ranks)
            found += [dict(listed[i : i + TOGETHER]) for i in range(0, len(listed), TOGETHER)]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # against hanging
@pytest.mark.parametrize("number", range(WORLDS))
def test_random_cells_equal_the_plain_loop(number: int, tmp_path: Path) -> None:
    assert len(_worlds()) == WORLDS
    drawn = _worlds()[number].items()
    cases = {name: case for name, case in drawn if runs_here(case.parallelism, experts=True)}
    if not cases:
        pytest.skip(f"torch {torch.__version__} runs none of them")
    found = compare(cases, tmp_path)
    for name, a in found.items():
        print(name, a)
    off = {n: a for n, a in found.items() if not max(a.loss, a.norm, a.gradient) <= EXACT}
    assert not off


COMPILED = named(
    [
        Case("moe", layout(ep=2), 2, COMPILE),
        Case("moe-global", layout(2, sp=True, ep=2), 4, {**COMPILE, **FULL}),
        Case("moe-capped", layout(2, ep=2), 2, COMPILE),
        Case("deepseek-mtp", layout(1, 2, ep=2), 4, COMPILE),
    ],
    train_iters=3,
    global_batch_size=4,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # against hanging
@pytest.mark.parametrize("name", COMPILED)
def test_blocks_compiled_around_their_experts_equal_the_plain_loop(
    name: str, tmp_path: Path
) -> None:
    (a,) = compare({name: COMPILED[name]}, tmp_path).values()
    assert max(a.loss, a.norm, a.gradient) <= EXACT and a.loads == 0
