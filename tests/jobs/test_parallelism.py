"""Words that exclude each other in how ranks share the work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainkit.jobs.ranks import ParallelDegrees, degrees_of
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Parallelism, Training

ZBV = {"pipeline_schedule": "zbv", "pipeline_model_parallel_size": 2}


def job(parallelism: dict[str, Any], training: dict[str, Any] | None = None, **model: Any) -> Job:
    return Job(
        name="big",
        cluster=Cluster(name="c", ranks_per_node=16),
        model=Model(
            name="m",
            num_layers=4,
            hidden_size=8,
            num_attention_heads=2,
            seq_length=8,
            vocab_size=9,
            **model,
        ),
        dataset=Dataset(name="mock", source="mock"),
        parallelism=Parallelism(**parallelism),
        training=Training(**{"train_iters": 1, "lr": 1.0, **(training or {})}),
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"data_parallel_replicate_size": 2, "zero_stage": 0},
            "with 0 every rank holds a whole copy",
        ),
        ({"pipeline_schedule": "zbv"}, "needs pipeline_model_parallel_size above 1"),
        (
            {**ZBV, "virtual_pipeline_model_parallel_size": 2},
            "no virtual_pipeline_model_parallel_size",
        ),
        ({"pipeline_schedule": "gpipe"}, "1f1b"),
    ],
)
def test_the_table_alone(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Parallelism(**keys)


@pytest.mark.parametrize(
    ("keys", "training", "model", "words"),
    [
        (ZBV, {"compile": True}, {}, "a compiled backward cannot be split in two"),
        (ZBV, {"recompute_granularity": "selective"}, {}, "goes through it twice"),
        (
            {"tensor_model_parallel_size": 2},
            {"compile": True},
            {"attention_dropout": 0.1},
            "needs sequence_parallel",
        ),
    ],
)
def test_with_the_rest_of_the_job(
    keys: dict[str, Any], training: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        job(keys, training, **model)


def test_neighbouring_words_are_taken() -> None:
    job(ZBV, {"recompute_granularity": "full"})
    job(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"compile": True},
        attention_dropout=0.1,
    )


def test_degrees() -> None:
    assert degrees_of(
        job({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    ) == ParallelDegrees(2, 2, 1, 4)
    assert degrees_of(job({"data_parallel_replicate_size": 4})) == ParallelDegrees(1, 1, 4, 4)
    # a whole copy on each
    assert degrees_of(job({"zero_stage": 0, "tensor_model_parallel_size": 4})) == ParallelDegrees(
        4, 1, 4, 1
    )
