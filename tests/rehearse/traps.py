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
from trainkit.rehearse import rank_checks
from trainkit.rehearse.rehearse import RehearsedCheck, State, rehearse
from trainkit.rehearse.scene import NotLookedAt

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

[containers.other]
runtime = "enroot"
image = "{folder}/images/v2.sqsh"

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

[tokenizers.fetched]
extends = "bytes"
vocab_file = "{folder}/fetched.json"
vocab_url = "http://127.0.0.1:9/vocab.json"

[datasets.fetched]
extends = "made"
tokenizer = "fetched"

[datasets.cut]                  # of /robin/ and .bin, sed "s/.bin//g" leaves /r/
extends = "made"
prefixes = ["{folder}/r/made_text_document"]

[datasets.with-ending]
extends = "made"
prefixes = ["{folder}/made_text_document.bin"]

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
    "missing file of a phase": Trap(
        "stages", ("lost_text_document",), sets=["phases=[{ dataset = 'lost', share = 0.5 }]"]
    ),
    "secret not set": Trap(
        "secrets", ("NO_SUCH_SECRET", "export"), sets=['cluster.secrets=["NO_SUCH_SECRET"]']
    ),
    "mount missing": Trap(
        "container", ("no-such-folder", "containers.box.mounts"), sets=["container=box"]
    ),
    "disk too small": Trap(
        "plan",
        ("checkpoint.keep_last", "file system slow has 0.000954 MiB"),
        sets=["cluster.filesystems.slow.capacity_bytes=1000"],
    ),
    "hostfile too short": Trap(
        "hosts", ("hosts", "32"), job="large", sets=["cluster.gpus_per_node=8"]
    ),
    "tokenizer that differs from the data's": Trap(
        "tokenizer", ("holds the id 398", "that these pairs were written with"), job="elsewhere"
    ),
    "no documents for validation": Trap(
        "plan",
        ("no documents for validation", "do not evaluate"),
        job="elsewhere",
        sets=["dataset.split='100,0,0'"],
    ),
    "sequence longer than the data": Trap(
        "plan", ("at most 2,400",), job="elsewhere", sets=["model.seq_length=2400"]
    ),
    "many epochs": Trap(
        "plan",
        ("elsewhere is read", "times"),
        job="elsewhere",
        sets=["training.train_iters=10000"],
        state="held",
    ),
    "a variable that the launcher sets": Trap(
        "job", ("MASTER_PORT has no effect",), sets=["env={ MASTER_PORT = '29500' }"]
    ),
    "memory that nobody knows": Trap(
        "plan",
        ("fit a rank", "devices.cuda.memory_bytes"),
        job="large",
        sets=["cluster.device='cuda'"],
        state="not looked at",
    ),
    "sequence longer than positions": Trap(
        "job",
        ("max_position_embeddings 8 is below seq_length 16",),
        sets=["model.max_position_embeddings=8"],
    ),
}
MOCK = ("dataset=mock", "model.vocab_size=50304")
# the same on other engines and kinds of cluster: Slurm, and ssh with a hostfile
FOREIGN = {
    "megatron-lm: sequence longer than positions": Trap(
        "job",
        ("max_position_embeddings 1024 is below seq_length 2048",),
        job="azure-gpt3-175b",
        sets=["model.max_position_embeddings=1024"],
        published=True,
    ),
    "nemo: sequence longer than positions": Trap(
        "job",
        ("is below seq_length 2048",),
        job="nemo-gpt3-5b",
        sets=["model.max_position_embeddings=1024"],
        published=True,
    ),
    "neuronx: sequence longer than positions": Trap(
        "job",
        ("is below seq_length 2048",),
        job="neuron-gpt3-23b",
        sets=["model.max_position_embeddings=1024"],
        published=True,
    ),
    "gpt-neox: wrong vocabulary": Trap(
        "tokenizer",
        ("257 ids", "raise model.vocab_size"),
        sets=["engine=gpt-neox", "model.vocab_size=100"],
    ),
    "gpt-neox: tokenizer that differs from the data's": Trap(
        "tokenizer",
        ("holds the id 398", "that these pairs were written with"),
        job="elsewhere",
        sets=["engine=gpt-neox"],
    ),
    "gpt-neox: hostfile too short": Trap(
        "hosts", ("hosts", "32"), job="large", sets=["engine=gpt-neox"]
    ),
    "megatron-lm: missing validation file": Trap(
        "stages",
        ("there is no", "lost/text_document.idx", "give paths"),
        job="jean-zay-7-5b",
        sets=["dataset.prefixes=['lost/text_document']"],
        published=True,
    ),
    "Slurm: secret not set": Trap(
        "secrets",
        ("NO_SUCH_SECRET", "export"),
        job="azure-gpt3-check",
        sets=['cluster.secrets=["NO_SUCH_SECRET"]', *MOCK],
        published=True,
    ),
    "ssh: mount missing": Trap(
        "container",
        ("no-such-folder", "containers.box.mounts"),
        job="large",
        sets=["nodes=2", "container=box"],
    ),
    "Slurm: disk too small": Trap(
        "disk",
        ("15 checkpoints of 2,", "GiB free", "lower checkpoint.keep_last"),
        job="azure-gpt3-175b",
        sets=MOCK,
        published=True,
    ),
    "a root of other machines is not looked at": Trap(
        "disk",
        ("/fsx is not on this machine",),
        job="neuron-gpt3-6-7b",
        sets=MOCK,
        published=True,
        state="not looked at",
    ),
    "a tokenizer that is fetched is not missed": Trap(
        "tokenizer",
        ("is fetched when the data are prepared",),
        sets=["dataset=fetched"],
        state="not looked at",
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
        sets=["nodes=15", *MOCK],
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
    "6: a data set by the name of its folder": Trap(
        "job",
        ("names no [datasets.X] table", "did you mean 'pile'"),
        job="gpt-neox-2-7b",
        sets=["dataset=pile_00"],
        published=True,
    ),
    "9: reports to W&B without a key": Trap(
        "secrets",
        ("WANDB_API_KEY",),
        sets=['wandb={ project = "neox" }'],
        environment={"WANDB_API_KEY": "", "WANDB_MODE": "", "HOME": "/nonexistent"},
    ),
    "12: a setting by a wrong name": Trap(
        "job",
        ("unknown key 'container.surce'", "did you mean 'container.source'"),
        job="azure-gpt3-175b",
        sets=["container.surce=docker://nvcr.io#nvidia/nemo:24.05"],
        published=True,
    ),
    "14: an option that the program has not": Trap(
        "engine",
        ("stage-path",),
        job="azure-gpt3-check",
        sets=["engine_args.stage-path=x", *MOCK],
        published=True,
    ),
    "17: a path cut by sed": Trap(
        "stages", ("r/made_text_document.idx", "paths without .bin"), sets=["dataset=cut"]
    ),
    "17: a path with its ending": Trap(
        "stages", ("paths without .bin and .idx",), sets=["dataset=with-ending"]
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
    "23: nodes whose names have a '-'": Trap(
        "hosts",
        ("compute1-dy-queue1-i1-1, compute1-dy-queue1-i1-2,",),
        job="large",
        sets=["nodes=2", 'cluster.hostfile="{folder}/dashed"'],
        state="held",
    ),
    "25: another tag than the image's": Trap(
        "container", ("images/v2.sqsh", "containers.other.image"), sets=["container=other"]
    ),
    "26: a size that nobody published": Trap(
        "job",
        ("names no [models.X] table", "did you mean 'nemo-gpt3-40b'"),
        job="nemo-gpt3-04b8",
        sets=["model=nemo-gpt3-04b"],
        published=True,
    ),
    "27: 5B as its README has it": Trap(
        "plan",
        ("does not divide", "2048"),
        job="nemo-gpt3-5b",
        sets=[
            *("nodes=20", "parallelism.tensor_model_parallel_size=2"),
            *MOCK,
        ],
        published=True,
    ),
}
# published traps that no tool can see in a job, and why; the tests that keep what trainkit does
UNSEEN = {
    4: "a speed-up that the document computed wrongly: `invoke compare` computes it of real runs",
    5: "gpt_j_tied is legal either way: tests/engines/gpt_neox/test_config.py, test_references.py",
    8: "a default that changed: a job names its data set (tests/jobs/test_references.py)",
    18: "defaults of a shell script that trainkit does not run: stages.prep-data has the README's",
    21: "a batch and ZeRO that are legal either way (tests/jobs/test_references.py)",
    22: "a shell's line end: argv has no shell (tests/engines/neuronx_nemo/test_neuronx_argv.py)",
    28: "GiB/s in words: the plan computes seconds from write_gib_per_second (test_references.py)",
}


def look_at(folder: Path, trap: Trap, checkout: Path) -> list[RehearsedCheck]:
    """All checks of a trap but those of ranks, which have tests of their own."""
    root = checkout if trap.published else folder
    with (
        mock.patch.object(rank_checks, "traced_ranks", side_effect=NotLookedAt("not in this test")),
        mock.patch.dict(os.environ, trap.environment),
    ):
        sets = tuple(text.replace("{folder}", str(folder)) for text in trap.sets)
        options = RehearseOptions(set=sets)
        report = rehearse(load(root), trap.job, options)
    json.dumps(report.to_json())
    return list(report.checks)
