"""The stages of a foreign engine as `train` shows them, makes them, and has them on Slurm."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.shared import golden
from tests.stages.engine_trees import git, repository
from tests.stages.test_engine_prebuild import TREE, made

REVISION = "core_v0.12.0"
JOBS = """
[clusters.here]
ranks_per_node = 2
node_folder = "{folder}/node"

[engines.megatron-lm]
source = "{source}"
revision = "{revision}"
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

[models.tiny]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64

[jobs.tiny]
engine = "megatron-lm"
cluster = "here"
model = "tiny"
dataset = "lines"
parallelism.zero_stage = 0

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 12
lr = 1e-3
precision = "fp32"
"""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A repository whose engine prints a word and trains nothing."""
    repo = repository(tmp_path / "published", TREE)
    git(repo, "tag", REVISION)
    return repo


@pytest.fixture
def project(tmp_path: Path, published: Path) -> Project:
    data = golden()
    if data is None or not (data.parent / "gpt2-vocab.json").is_file():
        pytest.skip("no GPT-2 vocabulary: see tests/shared.py")
    folder = tmp_path / "project"
    (folder / "corpus").mkdir(parents=True)
    lines = [json.dumps({"text": f"hello world number {i}"}) + "\n" for i in range(500)]
    (folder / "corpus" / "a.jsonl").write_text("".join(lines))
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(data.parent / f"gpt2-{name}", folder / name)
    text = JOBS.format(
        folder=folder, source=published.as_uri(), revision=REVISION, python=sys.executable
    )
    (folder / "jobs.toml").write_text(text)
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(folder)


def test_train_shows_and_makes_them_and_its_run_says_which_commit_it_was(
    project: Project, published: Path
) -> None:
    shown = project.invoke("train", "tiny", "--dry-run").stdout
    order = [
        shown.index(f"{stage} ") for stage in ("engine-source", "engine-prebuild", "prep-data")
    ]
    assert order == sorted(order)
    assert "would run" in shown and "trainkit.stages.engine_source clone.spec.json" in shown
    assert not (project.path / "engines").exists()
    # it prints a word and ends with 0, which is not a training
    project.invoke("train", "tiny", exit=9)
    tree = project.path / "engines" / f"megatron-lm-{REVISION}"
    assert made(tree).is_file()
    (run,) = project.runs()
    engine = json.loads((run / "origin.json").read_text())["engine"]
    assert engine["commit"] == git(published, "rev-parse", "HEAD") and engine["changed"] == []
    assert engine["tree"] == str(tree) and not (run / "engine.diff").exists()
    (tree / "pretrain_gpt.py").write_text("print('mine')\n")
    shown = project.invoke("train", "tiny", "--dry-run").stdout
    assert f"engine-source {tree.name} is fresh because {REVISION} was" in shown
    assert "changed since: pretrain_gpt.py" in shown
    assert "engine-prebuild megatron-lm is fresh because" in shown
    project.invoke("train", "tiny", exit=9)
    run = project.runs()[-1]
    engine = json.loads((run / "origin.json").read_text())["engine"]
    assert engine["changed"] == ["pretrain_gpt.py"] and engine["diff"] == "engine.diff"
    assert "+print('mine')" in (run / "engine.diff").read_text()


def test_a_wrong_revision_ends_train_before_data_are_prepared(project: Project) -> None:
    jobs = project.path / "jobs.toml"
    jobs.write_text(jobs.read_text().replace(f'"{REVISION}"', '"core_v0.12.9"'))
    error = project.invoke("train", "tiny", exit=6).stderr
    assert "has no revision 'core_v0.12.9'" in error and f"did you mean '{REVISION}'?" in error
    assert project.runs() == [] and not (project.path / "data").exists()
    stale = project.invoke("train", "tiny", "--no-stages", exit=5).stderr
    assert "its last making failed" in stale or "it was never cloned" in stale
