"""What NeMo would do otherwise, or end with, is said before the nodes wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.nemo.test_nemo_config import SETS_24, nemo_job, newer_job
from trainkit.base.errors import ConfigError
from trainkit.engines.megatron_lm.data import MegatronData
from trainkit.engines.nemo.data import PREFIX, data_options
from trainkit.engines.nemo.engine import Nemo
from trainkit.jobs.schema import Job


def refused(job: Job) -> list[str]:
    return [problem.message for problem in Nemo().problems(job)]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["parallelism.pipeline_model_parallel_size=5"], "44 does not divide by 5"),  # trap 7
        (["parallelism.zero_stage=2"], "stage 1"),
        (["training.save_interval=1000"], "saves after each validation"),
        (["training.eval_iters=0"], "by its loss"),
        (["training.eval_interval=80000", "training.save_interval=80000"], "val_check_interval"),
        (["training.lr_decay_style='linear'"], "'linear' has no counterpart in nemo 22.09"),
        (["training.lr_decay_iters=80000"], "ends with the training"),
        (["model.attention_dropout=0.0"], "0.1 in its code"),
        (["model.gelu='exact'"], "'tanh' in its code"),
        (["training.on_nan='skip'"], "no counterpart in nemo 22.09"),
        (
            [
                "parallelism.virtual_pipeline_model_parallel_size=2",
                "parallelism.pipeline_model_parallel_size=2",
            ],
            "its stages have one chunk",
        ),
        (["engine_args.model.num_layers=3"], "trainkit sets model.num_layers itself"),
        (["engine_args.model.mcore_gpt=true"], "has no option 'model.mcore_gpt'"),
        (["engine_args.model.megatron_amp_O2=3"], "expected true or false"),
        (["engine_args.+model.hidden_size=3"], "trainkit sets it itself"),
        (["engine_args.+model.seed=3"], "trainkit sets it itself"),
        (["engine_args.+model.megatron_amp_O2=true"], "has that key"),
        (["engine_args.numa_mapping.mod='x'"], "the launcher has no such key"),
        (["engine_args.numa_mapping.enable=1"], "expected bool"),
        (
            ["engine_args.exp_manager.checkpoint_callback_params.filename='{step}'"],
            "it has to hold {step} and {consumed_samples}",
        ),
        (["engine_args.exp_manager.resume_if_exists=false"], "would begin again"),
        (["engine_args.model.optim.sched.constant_steps=5"], "less lr_decay_iters, 12500"),
    ],
)
def test_refused_by_22_09(sets: list[str], words: str) -> None:
    job = nemo_job("nemo-gpt3-20b", *sets)
    assert any(words in message for message in refused(job)), refused(job)


def test_data_that_22_09_cannot_read() -> None:
    job = nemo_job("nemo-gpt3-20b")
    for change, words in (
        ({"source": "mock", "prefixes": ()}, "no random data"),
        ({"valid_files": 3}, "one splits_string"),
    ):
        dataset = job.dataset.model_copy(update=change)
        found = refused(job.model_copy(update={"dataset": dataset}))
        assert any(words in message for message in found), found


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["engine_args.numa_mapping.enable=true"], "binds no rank"),
        (["parallelism.pipeline_schedule='zbv'"], "1F1B"),
        (["engine_args.model.grad_chunk=3"], "has no option"),
    ],
)
def test_refused_by_24_12(sets: list[str], words: str) -> None:
    if "zbv" in sets[0]:
        sets = [*sets, "parallelism.pipeline_model_parallel_size=2"]
    sets = [*SETS_24["5b"], "engine_source.source='/opt/NeMo'", *sets]
    assert any(words in message for message in refused(nemo_job("nemo-gpt3-5b", *sets)))


def test_newer_has_what_older_has_not() -> None:
    job = newer_job("5b")
    model = job.model.model_copy(
        update={"gelu": "exact", "attention_dropout": 0.0, "num_query_groups": 8}
    )
    assert refused(job.model_copy(update={"model": model})) == []


def with_files(folder: Path, sizes: list[int]) -> tuple[Job, MegatronData]:
    """A job whose dataset has pairs of these sizes, and what it reads."""
    from trainkit.data.order.resolve_pairs import SplitPair

    prefixes = [folder / f"part_{number}_text_document" for number in range(len(sizes))]
    for prefix, size in zip(prefixes, sizes, strict=True):
        Path(f"{prefix}.bin").write_bytes(b"x" * size)
    job = nemo_job("nemo-gpt3-5b")
    args = {key: value for key, value in job.engine_args.items() if key != PREFIX}
    pairs = tuple(SplitPair("d", each, "98,1,1", True, each.name, None) for each in prefixes)
    found = MegatronData({"train": pairs, "valid": pairs, "test": pairs}, "98,1,1")
    return job.model_copy(update={"engine_args": args}), found


def test_a_blend_is_weighed_by_size(tmp_path: Path) -> None:
    """NeMo has one weight of each file and no way to find one."""
    job, data = with_files(tmp_path, [300, 100])
    found = data_options(job, data)
    assert found["splits_string"] == "98,1,1"
    assert found["data_prefix"] == [
        0.75,
        f"{tmp_path}/part_0_text_document",
        0.25,
        f"{tmp_path}/part_1_text_document",
    ]
    (tmp_path / "part_1_text_document.bin").unlink()
    with pytest.raises(ConfigError, match="and its size is its weight"):
        data_options(job, data)


def test_one_file_has_the_weight_one(tmp_path: Path) -> None:
    job, data = with_files(tmp_path, [0])
    assert data_options(job, data)["data_prefix"] == [1.0, f"{tmp_path}/part_0_text_document"]


def test_weights_of_engine_args_are_of_the_dataset_s_files(tmp_path: Path) -> None:
    job, data = with_files(tmp_path, [1, 2])
    names = ["part_1_text_document", f"{tmp_path}/part_0_text_document"]

    def given(*words: float | str) -> Job:
        return job.model_copy(update={"engine_args": {PREFIX: list(words)}})

    found = data_options(given(0.3, names[0], 0.7, names[1]), data)["data_prefix"]
    assert found == [0.3, f"{tmp_path}/{names[0]}", 0.7, names[1]]
    with pytest.raises(ConfigError, match="is not a pair of dataset"):
        data_options(given(1.0, "another"), data)
    for wrong in ((1.0,), ("a", 1.0), (1.0, 2.0)):
        assert any("weights and names by turns" in each for each in refused(given(*wrong)))


def test_splits_of_their_own_files_are_a_table(tmp_path: Path) -> None:
    job, data = with_files(tmp_path, [1, 3])
    apart = MegatronData(
        {
            "train": data.files["train"][:1],
            "valid": data.files["train"][1:],
            "test": data.files["train"],
        },
        None,
    )
    found = data_options(job, apart)
    assert found["data_prefix"] == {
        "train": [1.0, f"{tmp_path}/part_0_text_document"],
        "validation": [1.0, f"{tmp_path}/part_1_text_document"],
        "test": [
            0.25,
            f"{tmp_path}/part_0_text_document",
            0.75,
            f"{tmp_path}/part_1_text_document",
        ],
    }
