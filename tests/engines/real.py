"""Real trees of GPT-NeoX, Megatron-LM, Megatron-Bridge and torchtitan for tests, where the caller
names them.

TRAINKIT_MEGATRON_SOURCE, TRAINKIT_BRIDGE_SOURCE, TRAINKIT_NEOX_SOURCE and
TRAINKIT_TORCHTITAN_SOURCE name trees (several, separated by ":"), TRAINKIT_MEGATRON_PYTHON and so
on interpreters that have what they need.
TRAINKIT_FAKECUDA names a folder for PYTHONPATH whose sitecustomize.py lets them run without a GPU;
by default ../shared/lab/fakecuda beside the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shared import golden

CHECKOUT = Path(__file__).resolve().parents[2]
VARIABLES = {
    "megatron-lm": "TRAINKIT_MEGATRON",
    "megatron-bridge": "TRAINKIT_BRIDGE",
    "gpt-neox": "TRAINKIT_NEOX",
    "torchtitan": "TRAINKIT_TORCHTITAN",
}
# for what has no wheel for CPUs
BRIDGE_ON_CPUS = Path(__file__).with_name("stand_ins") / "megatron_bridge_cpu"
TORCHTITAN_ON_CPUS = Path(__file__).with_name("stand_ins") / "torchtitan_cpu"


TABLES = """
[engines.{engine}]
source = "{tree}"
python = "{python}"

[tokenizers.gpt2]
type = "gpt2"
vocab_size = 50257
vocab_file = "vocab.json"
merge_file = "merges.txt"

[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "gpt2"
split = "80,10,10"

[models.engine-tiny]
family = "{family}"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64
attention_dropout = 0.0
hidden_dropout = 0.0
{model}

[jobs.tiny]
engine = "{engine}"
cluster = "{cluster}"
model = "engine-tiny"
dataset = "lines"
nodes = {nodes}
{job}

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 12
lr = 1e-3
min_lr = 1e-4
lr_warmup_iters = 2
eval_iters = {eval_iters}
eval_interval = 6
save_interval = 4
log_interval = 1
precision = "{precision}"

[jobs.tiny.engine_args]
{engine_args}
"""
# what a machine without a GPU, Apex and Transformer Engine leaves of each engine
WITHOUT_GPU: dict[str, dict[str, str]] = {
    "megatron-lm": {
        "family": "gpt",
        "model": "",
        # 2021 has no distributed optimizer, and others need Apex or Transformer Engine to go on
        "job": "parallelism = { zero_stage = 0 }",
        "precision": "fp32",
        "eval_iters": "1",
        "engine_args": "",
    },
    "megatron-bridge": {
        "family": "gpt",
        "model": "",
        "job": "parallelism = { zero_stage = 0 }",
        "precision": "fp32",
        "eval_iters": "1",
        "engine_args": "",
    },
    "gpt-neox": {
        "family": "gpt-neox",
        "model": "",
        "job": "",
        "precision": "fp32",
        "eval_iters": "1",
        # with stock DeepSpeed its pipeline engine cannot evaluate
        "engine_args": "pipe_parallel_size = 0",
    },
    "torchtitan": {
        "family": "llama",
        "model": "",
        "job": "parallelism = { zero_stage = 2 }",
        "precision": "fp32",
        "eval_iters": "1",
        # the default is of a torch newer than 2.13
        "engine_args": '"parallelism.spmd_backend" = "partial_dtensor"',
    },
}


@dataclass(frozen=True)
class RealEngine:
    """A tree that runs here.

    Args:
        engine: its name in jobs.toml.
        tree: its source.
        python: the interpreter that has what it needs.
        fakecuda: the folder of the stand-in for torch.cuda, or for all GPUs.
    """

    engine: str
    tree: Path
    python: str
    fakecuda: Path

    @property
    def environment(self) -> dict[str, str]:
        """What lets it run on CPUs."""
        common = {
            "PYTHONPATH": str(self.fakecuda),
            "FAKECUDA": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.engine == "megatron-lm":
            return {**common, "FAKECUDA_TYPES": "1"}
        if self.engine == "megatron-bridge":
            path = f"{BRIDGE_ON_CPUS}:{self.fakecuda}"
            return {**common, "FAKECUDA_TYPES": "1", "PYTHONPATH": path}
        return {**common, "DS_ACCELERATOR": "cpu"}


def real_engines(engine: str) -> list[RealEngine]:
    """The trees of an engine that are named; none where there are none."""
    prefix = VARIABLES[engine]
    trees = os.environ.get(f"{prefix}_SOURCE", "")
    usual = CHECKOUT.parent / "shared" / "lab" / "fakecuda"
    fakecuda = Path(os.environ.get("TRAINKIT_FAKECUDA", usual))
    if engine == "torchtitan":
        fakecuda = TORCHTITAN_ON_CPUS
    python = os.environ.get(f"{prefix}_PYTHON", "")
    if not trees or not python or not (fakecuda / "sitecustomize.py").is_file():
        return []
    return [RealEngine(engine, Path(tree), python, fakecuda) for tree in trees.split(":")]


def parameters(engine: str) -> list[object]:
    """Parameters for a test of every named tree; one that is skipped, and says why, where none
    is."""
    found = real_engines(engine)
    if found:
        return [pytest.param(each, id=f"{engine}-{each.tree.name}") for each in found]
    prefix = VARIABLES[engine]
    why = f"no tree of {engine}: {prefix}_SOURCE, {prefix}_PYTHON and a stand-in for torch.cuda"
    return [pytest.param(None, id=engine, marks=pytest.mark.skip(reason=why))]


def write_job(folder: Path, real: RealEngine, cluster: str, nodes: int) -> str:
    """The tables of the job `tiny` of a real engine, for jobs.toml; its text and vocabulary are
    written into the folder.

    Args:
        folder: of jobs.toml.
        real: the engine.
        cluster: the [clusters.X] table that it runs on.
        nodes: so many of it.
    """
    data = golden()
    if data is None or not (data.parent / "gpt2-vocab.json").is_file():
        pytest.skip("no GPT-2 vocabulary: see tests/shared.py")
    shutil.copy(data.parent / "gpt2-vocab.json", folder / "vocab.json")
    shutil.copy(data.parent / "gpt2-merges.txt", folder / "merges.txt")
    (folder / "corpus").mkdir()
    text = (data.parent / "tinyshakespeare.txt").read_text()[:200_000]
    speeches = [json.dumps({"text": speech}) for speech in text.split("\n\n")]
    (folder / "corpus" / "plays.jsonl").write_text("\n".join(speeches) + "\n")
    return TABLES.format(
        engine=real.engine,
        tree=real.tree,
        python=real.python,
        cluster=cluster,
        nodes=nodes,
        **WITHOUT_GPU[real.engine],
    )


def environment_toml(real: RealEngine) -> str:
    """Its environment as an inline table."""
    pairs = (f"{name} = {json.dumps(value)}" for name, value in real.environment.items())
    return "{ " + ", ".join(pairs) + " }"
