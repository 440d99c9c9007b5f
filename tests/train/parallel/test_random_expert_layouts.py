"""Models with experts in random layouts against a plain loop over one process: ten steps, with
losses, norms, every gradient and the loads of all experts."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.train.layout_cases import COMPILE, EXACT, FULL, layout, named
from tests.train.layouts import Case, compare
from tests.train.random_cells import cells

CELLS, SPLIT, SEED = 300, 60, 20  # SPLIT: with context parallelism
TOGETHER = 10  # cells of one world


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
@pytest.mark.parametrize("number", range(len(_worlds())))
def test_random_cells_equal_the_plain_loop(number: int, tmp_path: Path) -> None:
    found = compare(_worlds()[number], tmp_path)
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
