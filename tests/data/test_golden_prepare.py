"""prep-data writes what Megatron-LM's preprocess_data.py wrote from the same lines with GPT-2's vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import Project
from tests.shared import golden

JOBS = """
[clusters.here]
[tokenizers.gpt2]
type = "file"
path = "gpt2.json"
[datasets.docs]
source = "files"
paths = ["docs.jsonl"]
tokenizer = "gpt2"
[models.tiny]
num_layers = 1
hidden_size = 8
num_attention_heads = 2
seq_length = 16
[jobs.docs]
cluster = "here"
model = "tiny"
dataset = "docs"
training = { train_iters = 1, lr = 1e-3 }
"""


def gpt2_tokenizer(data: Path) -> Tokenizer:
    """GPT-2's tokenizer from its vocabulary and merges."""
    lines = [line.split() for line in (data / "gpt2-merges.txt").read_text().splitlines() if line and not line.startswith("#version")]
    merges = [(left, right) for left, right in lines]
    tokenizer = Tokenizer(models.BPE(json.loads((data / "gpt2-vocab.json").read_text()), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def test_byte_equal_to_megatron(project: Project) -> None:
    vectors = golden()
    if vectors is None:
        pytest.skip("the golden files are not on this machine (TRAINKIT_TEST_DATA)")
    gpt2_tokenizer(vectors.parent).save(str(project.path / "gpt2.json"))
    shutil.copy(vectors / "docs.jsonl", project.path / "docs.jsonl")
    (project.path / "jobs.toml").write_text(JOBS)
    project.invoke("prep-data", "--job", "docs")
    for ending in (".bin", ".idx"):
        made = (project.path / "data/docs/gpt2/docs_text_document").with_suffix(ending).read_bytes()
        assert made == (vectors / f"pre_eod1_text_document{ending}").read_bytes(), ending
