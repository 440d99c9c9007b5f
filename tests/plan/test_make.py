"""The plan's arithmetic against published counts and by hand."""

from __future__ import annotations

import pytest

from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.plan.make import make_plan, model_flops_per_token_of, parameters_of

# Narayanan et al. 2021 (arXiv:2104.04473), table 1: layers, hidden size, printed billions; vocabulary 51,200, 2,048 positions.
PUBLISHED = [
    (24, 2304, 1.7),
    (30, 3072, 3.6),
    (36, 4096, 7.5),
    (40, 6144, 18.4),
    (48, 8192, 39.1),
    (60, 10240, 76.1),
    (80, 12288, 145.6),
    (96, 16384, 310.1),
    (105, 20480, 529.6),
    (128, 25600, 1008.0),
]


@pytest.mark.parametrize(("layers", "hidden", "billions"), PUBLISHED)
def test_published_parameter_counts(layers: int, hidden: int, billions: float) -> None:
    model = Model(num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, seq_length=2048)
    assert parameters_of(model, 51200) / 1e9 == pytest.approx(billions, abs=0.06)


def test_flops_are_three_times_the_matmuls_of_forward() -> None:
    model = Model(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=16, ffn_hidden_size=24)
    per_layer = 2 * 8 * 24 + 2 * 8 * 8 + 2 * 2 * 8 * 24 + 2 * 2 * 8 * 16 / 2  # qkv, out, mlp, scores and values over half the sequence
    assert model_flops_per_token_of(model, 100) == 3 * (2 * per_layer + 2 * 8 * 100)


def job(ranks: int, **training: int) -> Job:
    return Job(
        name="j",
        cluster=Cluster(name="c", ranks_per_node=ranks),
        model=Model(name="m", num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=16),
        dataset=Dataset(name="mock", source="mock"),
        training=Training.model_validate({"train_iters": 10, "lr": 1e-3, **training}),
    )


@pytest.mark.parametrize(
    ("ranks", "training", "batch", "steps"),
    [
        (2, {"micro_batch_size": 2, "global_batch_size": 8}, 8, 2),
        (2, {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, 12, 3),
        (4, {"micro_batch_size": 2}, 8, 1),
    ],
)
def test_one_of_batch_and_accumulation_follows_from_the_other(ranks: int, training: dict[str, int], batch: int, steps: int) -> None:
    plan = make_plan(job(ranks, **training))
    assert plan.feasible and (plan.global_batch_size, plan.gradient_accumulation_steps, plan.tokens) == (batch, steps, 10 * batch * 4)
    document = plan.to_json()
    assert document["schema"] == "plan/1" and document["feasible"] is True and document["checkpoint_bytes"] == 12 * document["parameters"]


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    plan = make_plan(job(3, micro_batch_size=2, global_batch_size=16))
    assert not plan.feasible and "nearest: 12 or 18" in plan.objections[0].message
    assert plan.to_json()["objections"][0]["key"] == "training.global_batch_size"
