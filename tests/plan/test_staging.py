"""Memory and disk of what `checkpoint` asks for."""

from __future__ import annotations

import pytest

from tests.plan.example import job_of
from trainkit.engines.registry import ENGINES
from trainkit.plan.planner import make_plan
from trainkit.plan.storage import checkpoints_on_disk


def test_a_save_behind_training_holds_its_bytes_once_more() -> None:
    """12 bytes a parameter, which ZeRO shards, in memory that is the device's on a CPU only."""
    plain, behind = (
        make_plan(job_of(checkpoint={"save_async": on})).memory for on in (False, True)
    )
    assert plain is not None and behind is not None
    assert plain.fullest.staging_bytes == 0
    rank = behind.fullest
    assert (
        rank.staging_bytes
        == rank.parameter_bytes + rank.optimizer_bytes
        == 3 * rank.parameter_bytes
    )
    assert rank.total_bytes == plain.fullest.total_bytes + rank.staging_bytes


def test_copies_in_memory_hold_them_twice_more() -> None:
    """On a CPU in the rank's own memory, beside what a save behind training holds; on several nodes
    those of a rank of another one too."""
    for nodes, times in ((1, 3), (2, 5)):
        behind, both = (
            make_plan(job_of(nodes=nodes, checkpoint={"save_async": True, **more})).memory
            for more in ({}, {"memory_interval": 5})
        )
        assert behind is not None and both is not None
        assert both.fullest.staging_bytes == times * behind.fullest.staging_bytes > 0


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        ({"keep_last": 2}, 3),
        ({"keep_last": 2, "keep_every": 20}, 8),
        ({"keep_last": 2, "keep_every": 15}, 6),
        ({"keep_last": 1, "keep_best": 3}, 5),
    ],
)
def test_what_stays_counts_on_disk(keep: dict[str, int], count: int) -> None:
    """Of 10 checkpoints: the newest, the one being written, the multiples that a save falls on,
    the best."""
    assert (
        checkpoints_on_disk(
            job_of(train_iters=100, save_interval=10, checkpoint=keep), ENGINES["native"].rules
        )
        == count
    )
