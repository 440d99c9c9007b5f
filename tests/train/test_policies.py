"""Overflows, losses that are not numbers, and spikes: what two ranks agree to do when one of
them is wrong."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_ranks
from tests.once import once
from tests.train.policies import OVERFLOWS
from tests.train.support import same

# Megatron's DynamicGradScaler from 1024 with window 4, hysteresis 2, minimum 256, step by step:
# after the step, its scale, growth tracker and hysteresis
# tracker; how many updates were applied; whether the weights moved (the first update has the rate 0
# of the warmup).
TABLE = [
    (1, 1024.0, 1, 2, 1, False),
    (2, 1024.0, 0, 1, 1, False),  # overflow: one chance is gone
    (3, 512.0, 0, 0, 1, False),  # overflow: halves
    (4, 256.0, 0, -1, 1, False),  # overflow: chances do not come back before a growth
    (5, 256.0, 1, -1, 2, True),
    (6, 256.0, 2, -1, 3, True),
    (7, 256.0, 3, -1, 4, True),
    (8, 512.0, 0, 2, 5, True),  # four good steps: doubles, chances are back
    (9, 512.0, 0, 1, 5, False),
    (10, 256.0, 0, 0, 5, False),
    (11, 256.0, 1, 0, 6, True),  # saved and gone on with here
    (12, 256.0, 2, 0, 7, True),
    (13, 256.0, 3, 0, 8, True),
    (14, 512.0, 0, 2, 9, True),
    (15, 512.0, 1, 2, 10, True),
    (16, 512.0, 0, 1, 10, False),
    (17, 512.0, 1, 1, 11, True),
    (18, 512.0, 2, 1, 12, True),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(
        tmp_path_factory, "policies", partial(run_ranks, 2, "tests.train.policies:scenarios")
    )


def test_fp16_follows_megatrons_rule_across_a_resume(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["fp16"]["table"] == ranks[1]["fp16"]["table"] == TABLE
    rows = ranks[0]["fp16"]["rows"]
    assert [r["step"] for r in rows if r["skipped_iterations"]] == list(OVERFLOWS)
    assert all(r["nan_iterations"] == 0 for r in rows)
    # the scale a step was taken with
    assert [r["loss_scale"] for r in rows] == [1024.0, *(scale for _, scale, *_ in TABLE[:-1])]
    rates = {r["step"]: r["learning_rate"] for r in rows}
    # a skipped step takes the schedule no further
    assert rates[2] == rates[3] == rates[4] == rates[5] == pytest.approx(1e-2 / 3)


def test_a_scale_that_cannot_fall_does_not_grow_on_bad_steps(ranks: list[dict[str, Any]]) -> None:
    rows = training_rows(ranks[0]["lowest"])
    assert [r["nan_iterations"] for r in rows] == [1] * 6 + [0] * 4
    # it doubles after the fourth good step, the tenth
    assert [r["loss_scale"] for r in rows] == [256.0] * 10
    assert ranks[0]["lowest"]["code"] == 0


def test_a_fixed_scale_skips_what_overflows_as_megatron_does(ranks: list[dict[str, Any]]) -> None:
    """But not without an end: then the scale is named."""
    rows = training_rows(ranks[0]["fixed"])
    assert [r["step"] for r in rows if r["skipped_iterations"]] == [4, 6, 7, 9]
    assert all(r["nan_iterations"] == 0 for r in rows)
    assert (ranks[0]["fixed"]["code"], ranks[0]["fixed"]["step"]) == (0, 10)
    assert same(ranks[0]["fixed"]["weights"], ranks[1]["fixed"]["weights"])
    ended = ranks[1]["fixed-too-many"]
    assert (ended["code"], ended["step"]) == (9, 7)
    assert "an overflow at loss_scale 1024; 3 steps in a row were skipped" in ended["error"]


def training_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if "eval" not in row]


def test_stop_leaves_the_weights_and_the_last_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["stop"]
        assert found["code"] == 9 and found["step"] == 6
        assert "step 6: lm loss 5.7" in found["error"] and "gradient norm inf" in found["error"]
        assert all(np.isfinite(weight).all() for weight in found["weights"].values())
    last = training_rows(ranks[0]["stop"])[-1]
    assert (last["step"], last["grad_norm"], last["nan_iterations"]) == (6, None, 1)


def test_a_stop_names_what_was_not_finite_first(ranks: list[dict[str, Any]]) -> None:
    """Data parallel and in a pipeline; all ranks tell the same. A gradient that went wrong once
    only is finite when it is computed again."""
    assert "computed again, everything is finite" in ranks[0]["stop"]["error"]
    for key, words in (
        (
            "value",
            (
                "the output of layers.1.mlp.down, 288 of 576 values, rank 1, micro-batch 1, sample"
                " 47 (sample 647414 of the train split of dataset 'mock'); 1 of"
            ),
        ),
        (
            "gradient",
            (
                "the gradient of the output of layers.0.mlp, 288 of 576 values, rank 0, micro-batch"
                " 2, sample 45 (sample 263305 of the train split"
            ),
        ),
    ):
        first, second = (rank[key] for rank in ranks)
        assert first == second and (first["code"], first["step"]) == (9, 6)
        assert first["error"].startswith("step 6: lm loss ") and words in first["error"]


def test_skip_passes_the_batch_over(ranks: list[dict[str, Any]]) -> None:
    """The second run of "skip" goes on from step 4, where the first was stopped."""
    found = ranks[0]["skip"]
    assert (found["code"], found["step"], found["consumed"]) == (0, 10, 80)
    rows = training_rows(found)
    assert [r["step"] for r in rows] == list(range(1, 11))
    assert [r["step"] for r in rows if r["nan_iterations"]] == [6]
    assert rows[6]["learning_rate"] == rows[5]["learning_rate"] > rows[7]["learning_rate"]
    assert same(found["weights"], ranks[1]["skip"]["weights"])
    assert "3 steps in a row were skipped (max_skipped_in_a_row 2)" in ranks[0]["too-many"]["error"]


def test_rollback_goes_on_after_the_bad_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["rollback"]
        # 12 batches read for 10 steps
        assert (found["code"], found["step"], found["consumed"]) == (0, 10, 96)
        assert all(np.isfinite(weight).all() for weight in found["weights"].values())
    rows = training_rows(ranks[0]["rollback"])
    assert [(r["step"], r["consumed_samples"]) for r in rows] == [
        (k, 8 * k + (16 if k > 4 else 0)) for k in range(1, 11)
    ]
    straight = training_rows(ranks[0]["ignored"])
    assert [r["batch_checksum"] for r in rows[:4]] == [r["batch_checksum"] for r in straight[:4]]
    # step 5 now has the batch after the bad one
    assert rows[4]["batch_checksum"] == straight[6]["batch_checksum"]
    assert "no checkpoint to roll back to" in ranks[0]["no-checkpoint"]["error"]
    assert (
        "max_rollbacks 2 are used up" in ranks[0]["used-up"]["error"]
        and ranks[0]["used-up"]["code"] == 9
    )


def test_a_row_tells_of_skipped_steps_whoever_writes_it(ranks: list[dict[str, Any]]) -> None:
    rows = training_rows(ranks[0]["unlogged"])
    assert [
        (r["step"], r["skipped_iterations"], r["nan_iterations"], r["rollbacks"]) for r in rows
    ] == [(5, 2, 2, 1), (10, 0, 0, 1)]


def test_a_full_disk_does_not_hide_what_ended_the_run(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["full"]["code"] == 9 and "step 6: lm loss" in rank["full"]["error"]


def test_a_device_that_answers_a_step_late(ranks: list[dict[str, Any]]) -> None:
    """As on CUDA: one more step is under way when a bad one is found. It is undone with it, and
    nothing bad is ever saved."""
    found = ranks[0]["late-rollback"]
    assert (found["code"], found["step"], found["consumed"]) == (0, 10, 8 * (10 + 3))
    assert [r["step"] for r in training_rows(found)] == list(range(1, 11))
    # the bad step's own row is taken back
    assert [(r["step"], r["rollbacks"]) for r in training_rows(found) if r["nan_iterations"]] == [
        (5, 1)
    ]
    stopped = ranks[0]["late-stop"]
    assert (stopped["code"], stopped["step"]) == (9, 8) and "step 8:" in stopped["error"]
    assert stopped["saved"] == ["step-00000004"]


def test_a_spike_is_undone(ranks: list[dict[str, Any]]) -> None:
    found, ignored = ranks[0]["spike"], ranks[0]["ignored"]
    # the blow in step 6 shows in the loss of step 7
    assert (found["code"], found["step"], found["consumed"]) == (0, 10, 8 * (10 + 3))
    assert (
        max(r["lm_loss"] for r in training_rows(found))
        < 6
        < max(r["lm_loss"] for r in training_rows(ignored))
    )
    assert ignored["code"] == 0 and not math.isnan(training_rows(ignored)[-1]["lm_loss"])


@pytest.mark.parametrize(
    ("name", "consumed"), [("dropout", 48), ("fp16", 48), ("bf16-sgd", 4 + 4 + 4 + 4 + 8 + 8)]
)
def test_resume_is_exact_with_dropout_in_every_precision(
    ranks: list[dict[str, Any]], name: str, consumed: int
) -> None:
    for rank in ranks:
        straight, broken = rank["resumed"][name]["weights"]
        assert same(straight, broken)
        assert rank["resumed"][name]["consumed"] == consumed


def test_every_validation_set_is_evaluated(ranks: list[dict[str, Any]]) -> None:
    rows = ranks[0]["resumed"]["dropout"]["evaluations"]
    assert [(row["step"], row["eval"]) for row in rows] == [
        (3, "valid"),
        (3, "second"),
        (6, "valid"),
        (6, "second"),
    ]
    assert all(5 < row["lm_loss"] < 7 for row in rows)
