"""Runs whose graphs were compiled by one process before: every rank finds all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import TASKS, Project

JOBS = """
[clusters.here]
ranks_per_node = 4
env = { TMPDIR = "FOLDER/node" }

[models.small]
family = "llama"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
seq_length = 16
vocab_size = 64

[jobs.tp]
cluster = "here"
model = "small"
dataset = "mock"
precompile = true
parallelism = { tensor_model_parallel_size = 2, sequence_parallel = true }

[jobs.tp.training]
micro_batch_size = 1
global_batch_size = 4
train_iters = 2
lr = 1e-3
compile = true
eval_iters = 1

[jobs.pp]
extends = "tp"

[jobs.pp.parallelism]
pipeline_model_parallel_size = 2
tensor_model_parallel_size = 1
sequence_parallel = false
"""
SAID = re.compile(r"all ranks: hits (\d+), misses (\d+)")


def said(project: Project, *words: str) -> tuple[int, int]:
    """Hits and misses of all ranks of a new run."""
    project.invoke("train", *words, TMPDIR=str(project.path / "node"))
    log = "".join(path.read_text() for path in project.runs()[-1].rglob("*.log"))
    found = SAID.search(log)
    assert found, log
    return int(found[1]), int(found[2])


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_every_rank_finds_every_graph(layout: str, tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "node").mkdir()
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "jobs.toml").write_text(JOBS.replace("FOLDER", str(tmp_path)))
    done = project.document("precompile", layout)
    assert done["failed"] == 0 and done["graphs"] == done["compiled"] + done["from_cache"]
    hits, misses = said(project, layout)
    assert hits >= 4 and misses == 0
    again = project.document("precompile", layout)
    assert again["fresh"] and again["compiled"] == 0 and again["seconds_saved"] > 0
    archive = Path(done["archive"])
    archive.write_bytes(archive.read_bytes()[:-2000])  # the record is of another file
    losses = project.losses(project.runs()[-1])
    run = said(project, layout, "--no-stages")
    assert run[1] > 0, "a damaged archive is a miss"
    assert project.losses(project.runs()[-1]) == losses, "never a wrong number"
