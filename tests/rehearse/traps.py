"""Jobs that would fail on their nodes, and the words with which a rehearsal says so."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from trainkit.experiment.options import RehearseOptions
from trainkit.jobs.load import load
from trainkit.rehearse import rehearse as module
from trainkit.rehearse.report import NotLookedAt, RehearsedCheck, State

JOBS = """
[clusters.here]
launcher = "local"
device = "cpu"
ranks_per_node = 2

[clusters.far]
launcher = "ssh"
device = "h100-sxm-80gb"
gpus_per_node = 8
hostfile = "{folder}/hosts"
root = "{folder}"

[containers.box]
runtime = "docker"
image = "trainkit:1"
mounts = ["{folder}/no-such-folder:/data"]

[tokenizers.bytes]
type = "gpt2"
vocab_file = "{folder}/vocab.json"
merge_file = "{folder}/merges.txt"

[tokenizers.azure]
extends = "bytes"
merge_file = "{folder}/vocab.json"

[datasets.made]
source = "indexed"
prefixes = ["{folder}/made_text_document"]
tokenizer = "bytes"
split = "80,10,10"

[datasets.elsewhere]
extends = "made"
prefixes = ["{folder}/elsewhere_text_document"]

[datasets.lost]
extends = "made"
prefixes = ["{folder}/lost_text_document"]

[datasets.robin]
extends = "made"
prefixes = ["{folder}/robin/a.bin_text_document"]

[datasets.joined]
source = "files"
paths = ["{folder}/train_chunk_*.jsonl"]
files = 72
tokenizer = "bytes"
split = "80,10,10"

[datasets.azure]
extends = "made"
tokenizer = "azure"

[models.small]
family = "gpt"
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16

[models.gpt-76b]
family = "gpt"
num_layers = 60
hidden_size = 10240
num_attention_heads = 80
seq_length = 1024
vocab_size = 51200

[models.gpt-13b]                # 20B.yml with hidden 4096, as published under that name
family = "gpt-neox"
num_layers = 44
hidden_size = 4096
num_attention_heads = 64
seq_length = 2048
vocab_size = 50432

[jobs.small]
cluster = "here"
model = "small"
dataset = "made"
training = {{ train_iters = 4, lr = 1e-3, global_batch_size = 8, eval_iters = 1 }}

[jobs.elsewhere]
extends = "small"
dataset = "elsewhere"

[jobs.large]
cluster = "far"
model = "gpt-76b"
dataset = "mock"
nodes = 32
training = {{ train_iters = 4, lr = 1e-3, precision = "bf16", global_batch_size = 1024 }}
"""


@dataclass(frozen=True)
class Trap:
    """A job that should not be started.

    Args:
        check: the one that must fail.
        words: in its message, or in its way out.
        job: of JOBS, or of the checkout where `published`.
        sets: KEY=VALUE each.
        environment: variables besides.
        published: the job is one of the checkout's own.
        state: of the check: what the tool gets right, or only notes, holds.
    """

    check: str
    words: Sequence[str]
    job: str = "small"
    sets: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    published: bool = False
    state: State = "failed"


OWN = {
    "wrong vocabulary": Trap(
        "tokenizer", ("257 ids", "raise model.vocab_size"), sets=["model.vocab_size=100"]
    ),
    "missing validation file": Trap(
        "stages", ("lost_text_document",), sets=["validation.other=lost"]
    ),
    "secret not set": Trap(
        "secrets", ("NO_SUCH_SECRET", "export"), sets=['cluster.secrets=["NO_SUCH_SECRET"]']
    ),
    "mount missing": Trap(
        "container", ("no-such-folder", "containers.box.mounts"), sets=["container=box"]
    ),
    "disk too small": Trap(
        "plan",
        ("checkpoint.keep_last", "file system slow has 0.0 GiB"),
        sets=["cluster.filesystems.slow.capacity_bytes=1000"],
    ),
    "hostfile too short": Trap(
        "hosts", ("hosts", "32"), job="large", sets=["cluster.gpus_per_node=8"]
    ),
    "tokenizer that differs from the data's": Trap(
        "tokenizer", ("holds the id 398", "that these pairs were written with"), job="elsewhere"
    ),
    "sequence longer than positions": Trap(
        "job",
        ("max_position_embeddings 8 is below seq_length 16",),
        sets=["model.max_position_embeddings=8"],
    ),
}
PUBLISHED = {
    "1: 60 layers on 32 stages": Trap(
        "plan",
        ("60 layers do not divide over 32 pipeline stages",),
        job="jean-zay-76b",
        published=True,
    ),
    "11: vocab.json in the place of merges.txt": Trap(
        "job", ("vocab.json", "merges.txt"), sets=["dataset=azure"]
    ),
    "19: a sequence longer than its positions": Trap(
        "job", ("is below seq_length",), sets=["model.max_position_embeddings=8"]
    ),
    "20: nodes that tensor x pipeline do not divide": Trap(
        "plan",
        ("does not divide", "nodes"),
        job="azure-gpt3-175b",
        sets=["nodes=15", "dataset=mock", "model.vocab_size=50304"],
        published=True,
    ),
    "24: out of memory after 60 steps": Trap(
        "plan", ("it may not fit",), job="jean-zay-30b", state="held", published=True
    ),
    "2: 857M that are 356": Trap(
        "plan",
        ("355.9 million", "says 857 million", "or the name"),
        job="azure-gpt3-857m",
        state="held",
        published=True,
    ),
    "3: 13B that are 9": Trap(
        "plan",
        ("9,27", "'gpt-13b' says 13,000 million"),
        job="large",
        sets=["model=gpt-13b", "parallelism.zero_stage=3"],
        state="held",
    ),
    "7: 44 layers on 6 stages, which GPT-NeoX takes": Trap(
        "plan", ("million parameters",), job="gpt-neox-20b-lambda", state="held", published=True
    ),
    "10: a hostfile without a newline at its end": Trap(
        "hosts", ("node1, node2",), job="large", sets=["nodes=2"], state="held"
    ),
    "6: a dataset that does not exist": Trap(
        "job", ("dataset = 'mad' names no", "did you mean 'made'"), sets=["dataset=mad"]
    ),
    "9: reports to Weights & Biases without a key": Trap(
        "secrets", ("no WANDB_API_KEY", 'wandb.mode = "offline"'), sets=["wandb.project=neox"]
    ),
    "13: a checkpoint every 10,000 steps of 1,500": Trap(
        "plan",
        ("none before the end",),
        sets=["training.save_interval=10000", "training.train_iters=1500"],
        state="held",
    ),
    "15, 16: 72 files were promised, three are there": Trap(
        "stages", ("3 files are there, files = 72", "not copied"), sets=["dataset=joined"]
    ),
    "17: .bin in the middle of a path": Trap(
        "stages", ("prep-data robin",), sets=["dataset=robin"], state="held"
    ),
    "23: nodes whose names have a '-'": Trap(
        "hosts",
        ("compute1-dy-queue1-i1-1, compute1-dy-queue1-i1-2,",),
        job="large",
        sets=["nodes=2", 'cluster.hostfile="{folder}/dashed"'],
        state="held",
    ),
}
# What a rehearsal cannot see, and what keeps the tool from it: a test, or the reason why nothing
# can.
ELSEWHERE = {
    4: "tests/reports/test_scaling.py",  # a speed-up that `runs --table --scaling` prints
    5: "tests/engines/gpt_neox/test_config.py",  # a file says more than its text
    8: "tests/jobs/test_references.py",  # which data were the default
    12: "a misspelt variable of another project's script; here an unknown key is refused",
    14: "the command line of another project's script; here a dataset is named in jobs.toml",
    18: "defaults of another project's script",
    21: "tests/engines/neuronx_nemo/test_neuronx_argv.py",  # two versions of a batch, both legal
    22: "tests/engines/neuronx_nemo/test_neuronx_argv.py",  # words of a shell; here there is none
    25: "tags and files named twice in another project's scripts; here a job has one container",
    26: "tests/engines/nemo/test_nemo_config.py",  # sizes in names of jobs
    27: "tests/engines/nemo/test_nemo_config.py",  # a text and its files disagree
    28: "tests/plan/test_published.py",  # units of a published table
}


def look_at(folder: Path, trap: Trap, checkout: Path) -> list[RehearsedCheck]:
    """All checks of a trap but those of ranks, which have tests of their own."""
    root = checkout if trap.published else folder
    with (
        mock.patch.object(module, "traced_ranks", side_effect=NotLookedAt("not in this test")),
        mock.patch.dict(os.environ, trap.environment),
    ):
        sets = tuple(text.replace("{folder}", str(folder)) for text in trap.sets)
        options = RehearseOptions(set=sets)
        report = module.rehearse(load(root), trap.job, options)
    json.dumps(report.to_json())
    return list(report.checks)
