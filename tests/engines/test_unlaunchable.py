"""What can be planned for and not launched is refused with words, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.base.errors import ConfigError
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Parallelism, Training


def job(**changed: Any) -> Job:
    return Job(
        **{
            "name": "big",
            "cluster": Cluster(name="c"),
            "model": Model(
                name="m",
                num_layers=2,
                hidden_size=8,
                num_attention_heads=2,
                seq_length=8,
                vocab_size=9,
            ),
            "dataset": Dataset(name="mock", source="mock"),
            "training": Training(train_iters=1, lr=1.0),
            **changed,
        }
    )


def test_what_runs_here_is_not_refused() -> None:
    refuse_unlaunchable(job())
    refuse_unlaunchable(
        job(
            parallelism=Parallelism(
                tensor_model_parallel_size=2, pipeline_model_parallel_size=3, zero_stage=3
            )
        )
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {
                "cluster": Cluster(name="c", launcher="slurm", device=built_in_device("trn1-core")),
                "nodes": 4,
            },
            ["'trn1-core'"],
        ),
    ],
)
def test_all_reasons_at_once(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unlaunchable(job(**changed))
    assert caught.value.exit == 3
    assert len(caught.value.list) == len(words)
    for problem, part in zip(caught.value.list, words, strict=True):
        assert (
            part in problem.message
            and "not launched by this version" in problem.message
            and "invoke plan big" in problem.hint
        )
