"""`invoke precompile`: a job's graphs are compiled by its own command, as a run, with a program
in the place of neuron_parallel_compile that says what it says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TASKS, Project
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.engines.neuronx_nemo.engine import FOLDER, MODULES

JOBS = """
[engines.neuronx-nemo]
source = "{folder}/tree"
python = "{folder}/venv/bin/python"

[clusters.here]

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

[models.small]
family = "gpt"
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
gelu = "exact"

[jobs.small]
engine = "neuronx-nemo"
cluster = "here"
model = "small"
dataset = "made"
training = {{ train_iters = 30, lr = 1e-3, precision = "bf16" }}
"""
TORCHRUN = """#!{python}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({said!r}, "w"))
print("Epoch 0:   0%| | 1/30 [00:01<00:29, 1.00s/it, reduced_train_loss=nan, global_step=0.000]")
"""
COMPILE = """#!/bin/sh
"$@" || exit $?
mkdir -p "$NEURON_COMPILE_CACHE_URL/neuronxcc/MODULE_7+3cc"
echo "x INFO ||NEURON_PARALLEL_COMPILE||: Total graphs: 3"
echo "x INFO ||NEURON_PARALLEL_COMPILE||: Total successful compilations: $((3 - FAILED))"
echo "x INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: $FAILED"
[ "$FAILED" = 0 ] || echo "Failed compilation with ['neuronx-cc', '/t/model.MODULE_7+3cc.pb']"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose engine's programs are small scripts. Graphs go into a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tree = tmp_path / "tree"
    (tree / FOLDER).mkdir(parents=True)
    for name in ("build.sh", FOLDER / "megatron_gpt_pretraining.py", FOLDER / "train_setup.sh"):
        (tree / name).touch()
    for name in MODULES:
        if name not in ("torch", "transformers"):
            (tree / FOLDER / name).mkdir()
            (tree / FOLDER / name / "__init__.py").touch()
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    said = str(tmp_path / "said.json")
    (programs / "torchrun").write_text(TORCHRUN.format(python=sys.executable, said=said))
    (programs / "neuron_parallel_compile").write_text(COMPILE)
    for path in programs.iterdir():
        path.chmod(0o755)
    names = [f"b{number}" for number in range(256)]
    vocabulary = {name: number for number, name in enumerate([*names, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with IndexedWriter(tmp_path / "made_text_document", np.uint16) as writer:
        for document in range(40):
            writer.add_document(np.arange(60, dtype=np.uint16) + document)
    (tmp_path / "jobs.toml").write_text(JOBS.format(folder=tmp_path))
    (tmp_path / "tasks.py").write_text(TASKS)
    return Project(tmp_path)


def test_graphs_that_are_gone_are_compiled_again(project: Project) -> None:
    """And a training says so, as long as they are not there."""
    sets = ["--set", failing(0), "--set", f'env.NEURON_COMPILE_CACHE_URL="{project.path}/cache"']
    note = "graphs of small are compiled on 0 of 1 nodes"
    assert note in project.invoke("train", "small", *sets, "--dry-run").stdout
    dry = project.invoke("precompile", "small", "--share", *sets, "--dry-run").stdout
    assert "compiles the graphs of a few steps" in dry and "30 steps" not in dry
    project.invoke("precompile", "small", "--share", *sets)
    assert note not in project.invoke("train", "small", *sets, "--dry-run").stdout
    shutil.rmtree(project.path / "cache")
    assert note in project.invoke("train", "small", *sets, "--dry-run").stdout
    again = project.invoke("precompile", "small", "--share", *sets, "--dry-run").stdout
    assert "neuron_parallel_compile torchrun" in again


def failing(number: int) -> str:
    return f'env.FAILED="{number}"'


def test_graphs_are_compiled_once(project: Project) -> None:
    done = project.invoke("precompile", "small", "--share", "--set", failing(0))
    assert "all graphs of small are compiled; next: invoke train small" in done.stdout
    (run,) = project.runs()
    argv, variables = json.loads((project.path / "said.json").read_text())
    assert argv[:4] == ["--nproc_per_node", "1", "--nnodes", "1"]
    assert argv[4:8] == ["--node_rank", "0", "--master_addr", "localhost"]
    assert "trainer.max_steps=4" in argv and "model.optim.sched.constant_steps=0" in argv
    assert variables["NEURON_PARALLEL_COMPILE_DUMP_RESULTS"] == "1"
    assert variables["NEURON_COMPILE_CACHE_URL"] == f"{variables['HOME']}/neuron_cache"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(variables)
    # losses of extracted graphs are not numbers of a training
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()
    (record,) = (project.path / "engines" / "graphs").glob("*/0.json")
    assert json.loads(record.read_text())["graphs"] == 3
    again = project.invoke("precompile", "small", "--share", "--set", failing(0))
    assert "are compiled on all 1 nodes" in again.stdout
    assert len(project.runs()) == 1
    changed = ["--set", failing(0), "--set", "training.micro_batch_size=2", "--dry-run"]
    other = project.invoke("precompile", "small", "--share", *changed)  # other graphs
    assert "neuron_parallel_compile torchrun" in other.stdout
    forced = project.invoke(
        "precompile", "small", "--share", "--set", failing(0), "--force", "--dry-run"
    )
    assert "neuron_parallel_compile torchrun" in forced.stdout


def test_failed_graphs_are_named(project: Project) -> None:
    done = project.invoke("precompile", "small", "--share", "--set", failing(1), exit=9)
    assert "1 of 3 graphs could not be compiled" in done.stdout + done.stderr
    assert not (project.path / "engines" / "graphs").exists()


def test_other_engines_have_nothing_to_compile(project: Project) -> None:
    native = ["--set", "engine=native", "--set", "training.precision=fp32"]
    done = project.invoke("precompile", "small", "--share", *native, exit=3)
    assert "precompile without training.compile" in done.stderr
    other = ["--set", "engine=megatron-lm", "--set", "precompile=true"]
    done = project.invoke("train", "small", *other, exit=3)
    assert "precompile with engine = 'megatron-lm'" in done.stderr
