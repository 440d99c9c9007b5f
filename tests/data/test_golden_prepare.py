"""prep-data writes what Megatron-LM's preprocess_data.py wrote from the same lines with GPT-2's vocabulary."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import Project
from tests.shared import golden

JOBS = """
[clusters.here]
[tokenizers.gpt2]
type = "gpt2"
vocab_file = "gpt2-vocab.json"
merge_file = "gpt2-merges.txt"
append_eod = {append_eod}
encoder = "{encoder}"
special_tokens = "parse"
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
training = {{ train_iters = 1, lr = 1e-3 }}
"""


ENCODERS = ["tokenizers", "gigatoken"]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("append_eod", [True, False])
def test_byte_equal_to_megatron(append_eod: bool, encoder: str, project: Project) -> None:
    vectors = golden()
    if vectors is None:
        pytest.skip("the golden files are not on this machine (TRAINKIT_TEST_DATA)")
    if encoder == "gigatoken":
        pytest.importorskip("gigatoken")
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(vectors.parent / name, project.path / name)
    shutil.copy(vectors / "docs.jsonl", project.path / "docs.jsonl")
    (project.path / "jobs.toml").write_text(JOBS.format(append_eod=str(append_eod).lower(), encoder=encoder))
    project.invoke("prep-data", "--job", "docs")
    for ending in (".bin", ".idx"):
        made = (project.path / "data/docs/gpt2/docs_text_document").with_suffix(ending).read_bytes()
        assert made == (vectors / f"pre_eod{int(append_eod)}_text_document{ending}").read_bytes(), ending
