"""Which pairs GPT-NeoX reads for each split."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.engines.gpt_neox.config import neox_data
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job

JOBS = """
[engines.gpt-neox]
source = "https://github.com/EleutherAI/gpt-neox"
revision = "ea7aefd"

[tokenizers.gpt2]
type = "gpt2"
vocab_size = 50257
vocab_file = "vocab.json"
merge_file = "merges.txt"

[datasets.one]
source = "indexed"
prefixes = ["pairs/a"]
tokenizer = "gpt2"
split = "90,10"

[datasets.held-out]
extends = "one"
prefixes = ["pairs/{a,b,c,d}"]

[datasets.many]
extends = "one"
prefixes = ["pairs/*"]

[datasets.b]
extends = "one"
prefixes = ["pairs/b"]

[datasets.mixed]
source = "blend"
tokenizer = "gpt2"
blend = { one = 3.0, b = 1.0 }

[datasets.mixed-apart]
extends = "mixed"
valid_blend = { c = 1.0 }
test_blend = { d = 1.0 }

[datasets.c]
extends = "one"
prefixes = ["pairs/c"]

[datasets.d]
extends = "one"
prefixes = ["pairs/d"]

[models.small]
family = "gpt-neox"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64

[clusters.here]

[jobs.small]
engine = "gpt-neox"
cluster = "here"
model = "small"
dataset = "one"
training = { train_iters = 10, lr = 1e-3 }
"""


def job_of(folder: Path, *sets: str) -> Job:
    text = JOBS.replace('"pairs/{a,b,c,d}"', '"pairs/a", "pairs/b", "pairs/c", "pairs/d"')
    (folder / "jobs.toml").write_text(text)
    (folder / "pairs").mkdir(exist_ok=True)
    for number, name in enumerate("abcd", start=1):
        (folder / "pairs" / f"{name}.idx").write_bytes(b"")
        (folder / "pairs" / f"{name}.bin").write_bytes(bytes(100 * number))
    return load(folder, environ={}).resolve("small", sets).job


def test_one_pair_is_cut_by_split(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert GptNeox().problems(job) == []
    assert neox_data(job).words() == {
        "data_impl": "mmap",
        "data_path": str(tmp_path / "pairs" / "a"),
        "split": "90,10",
    }


def test_files_held_out_are_splits_of_their_own_weighted_by_size(tmp_path: Path) -> None:
    job = job_of(tmp_path, "dataset=held-out", "dataset.valid_files=1", "dataset.test_files=1")
    assert GptNeox().problems(job) == []
    pairs = tmp_path / "pairs"
    assert neox_data(job).words() == {
        "data_impl": "mmap",
        "train_data_paths": [str(pairs / "a"), str(pairs / "b")],
        "train_data_weights": [100.0, 200.0],
        "valid_data_paths": [str(pairs / "d")],
        "valid_data_weights": [1.0],
        "test_data_paths": [str(pairs / "c")],
        "test_data_weights": [1.0],
    }


def test_a_blend_with_blends_of_its_own_for_validation_and_test(tmp_path: Path) -> None:
    job = job_of(tmp_path, "dataset=mixed-apart")
    assert GptNeox().problems(job) == []
    words = neox_data(job).words()
    assert words["train_data_weights"] == [3.0, 1.0]
    assert words["valid_data_paths"] == [str(tmp_path / "pairs" / "c")]


@pytest.mark.parametrize("dataset", ["mixed", "held-out"])
def test_several_pairs_that_are_to_be_cut_are_refused(tmp_path: Path, dataset: str) -> None:
    """GPT-NeoX reads the pairs of a blend whole: it would validate on what it trains on."""
    problems = GptNeox().problems(job_of(tmp_path, f"dataset={dataset}"))
    assert problems and "gpt-neox cuts one .bin/.idx pair by `split`" in problems[0].message


def test_so_are_those_that_only_a_pattern_names(tmp_path: Path) -> None:
    job = job_of(tmp_path, "dataset=many")
    with pytest.raises(ConfigError, match="4 pairs of a blend it reads whole"):
        neox_data(job)
