"""prep-data writes what Megatron-LM's preprocess_data.py wrote from the same lines with GPT-2's
vocabulary."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import Project, wait_for
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
paths = ["docs-*.jsonl"]
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


def prepare(project: Project, append_eod: bool, encoder: str, files: int) -> Path:
    """Megatron's lines in so many files, and the jobs.toml; returns the folder of the golden
    files."""
    vectors = golden()
    if vectors is None:
        pytest.skip("the golden files are not on this machine (TRAINKIT_TEST_DATA)")
    if encoder == "gigatoken":
        pytest.importorskip("gigatoken")
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(vectors.parent / name, project.path / name)
    lines = (vectors / "docs.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(files):
        part = lines[number * len(lines) // files : (number + 1) * len(lines) // files]
        (project.path / f"docs-{number}.jsonl").write_bytes(b"".join(part))
    (project.path / "jobs.toml").write_text(
        JOBS.format(append_eod=str(append_eod).lower(), encoder=encoder)
    )
    return vectors


def assert_golden(project: Project, vectors: Path, append_eod: bool) -> None:
    for ending in (".bin", ".idx"):
        made = (project.path / "data/docs/gpt2/docs_text_document").with_suffix(ending).read_bytes()
        assert made == (vectors / f"pre_eod{int(append_eod)}_text_document{ending}").read_bytes(), (
            ending
        )


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("append_eod", [True, False])
def test_byte_equal_to_megatron(append_eod: bool, encoder: str, project: Project) -> None:
    vectors = prepare(project, append_eod, encoder, files=1)
    project.invoke("prep-data", "--job", "docs")
    assert_golden(project, vectors, append_eod)


def test_byte_equal_from_two_workers_and_after_a_kill(project: Project) -> None:
    vectors = prepare(project, True, "tokenizers", files=6)
    first = project.start("prep-data", "--job", "docs", "--workers", "1")
    units = project.path / "stamps/prep-data/docs--gpt2.units"
    wait_for(lambda: units.is_dir() and any(units.glob("tokens-*.json")), "the first shard")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    project.invoke("prep-data", "--job", "docs", "--workers", "2")
    assert_golden(project, vectors, True)
