"""A job of three steps for each stand-in: two nodes with a rank each, two pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.data.indexed.dataset import IndexedWriter

TABLES = """
[tokenizers.bytes]
type = "gpt2"
vocab_size = 257
vocab_file = "{folder}/vocab.json"
merge_file = "{folder}/merges.txt"

[datasets.made]
source = "indexed"
prefixes = ["{folder}/made_text_document"]
tokenizer = "bytes"
split = "80,10,10"

[models.stand-in]
family = "gpt"
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
max_position_embeddings = 16
gelu = "{gelu}"
untie_embeddings_and_output_weights = false
attention_dropout = 0.1
hidden_dropout = 0.1
init_method_std = 0.02

[jobs.stand-in]
engine = "{engine}"
cluster = "{cluster}"
model = "stand-in"
dataset = "made"
nodes = 2
parallelism = {{ tensor_model_parallel_size = 1, pipeline_model_parallel_size = 2, zero_stage = {zero} }}
checkpoint = {{ keep_last = 2 }}

[jobs.stand-in.training]
micro_batch_size = 1
global_batch_size = 8
train_iters = 3
lr = 1e-3
min_lr = 1e-4
lr_warmup_iters = 1
lr_decay_iters = 3
eval_iters = 1
eval_interval = 1
save_interval = 1
log_interval = 1
precision = "bf16"
"""  # noqa: E501  one table of TOML


def write_data(folder: Path) -> None:
    """A vocabulary of bytes, and a pair of files with tokens of it."""
    names = [f"b{number}" for number in range(256)]
    vocabulary = {name: number for number, name in enumerate([*names, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with IndexedWriter(folder / "made_text_document", np.uint16) as writer:
        for document in range(40):
            writer.add_document(np.arange(60, dtype=np.uint16) + document)


def tables(folder: Path, engine: str, cluster: str, **more: object) -> str:
    """[jobs.stand-in] and all that it names but the engine's and the cluster's tables.

    Args:
        folder: of the data.
        engine: nemo or neuronx-nemo.
        cluster: on which it runs.
        more: keys of the job, under its table.
    """
    zero = 1 if engine == "nemo" else 0
    gelu = "tanh" if engine == "nemo" else "exact"
    text = TABLES.format(folder=folder, engine=engine, cluster=cluster, zero=zero, gelu=gelu)
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
    return text.replace("nodes = 2\n", f"nodes = 2\n{lines}")


def empty_packages(folder: Path, names: Sequence[str]) -> Path:
    """Packages without content, which an interpreter finds by PYTHONPATH."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").touch()
    return folder
