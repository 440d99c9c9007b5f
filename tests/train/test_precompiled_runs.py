"""Runs whose graphs were compiled by one process before: every rank finds all of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
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
    found = SAID.search(logs(project))
    assert found, logs(project)
    return int(found[1]), int(found[2])


def logs(project: Project) -> str:
    """What the newest run wrote."""
    return "".join(path.read_text() for path in project.runs()[-1].rglob("*.log"))


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_every_rank_finds_every_graph(layout: str, tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "node").mkdir()
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "jobs.toml").write_text(JOBS.replace("FOLDER", str(tmp_path)))
    done = project.document("precompile", layout)
    assert done["failed"] == 0 and done["graphs"] == done["compiled"] + done["from_cache"]
    ranks = {"tp": 4, "pp": 2}[layout]
    # each a block's forward without a backward, of an evaluation, and its forward and backward
    assert said(project, layout) == (3 * ranks, 0)
    warm = project.losses(project.runs()[-1])
    again = project.document("precompile", layout)
    assert again["fresh"] and again["compiled"] == 0 and again["seconds_saved"] > 0
    archive = Path(done["archive"])
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-2000])  # the record is of another file
    shutil.rmtree(tmp_path / "node")
    (tmp_path / "node").mkdir()
    assert said(project, layout, "--no-stages")[1] > 0, "a damaged archive is a miss"
    assert f"{archive} is damaged" in logs(project)
    assert project.losses(project.runs()[-1]) == warm, "what a cold compilation computes"


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
def test_a_killed_compilation_leaves_nothing_half(tmp_path: Path) -> None:
    """At several moments: as it begins to compile, with the first graph, and with the index."""
    project = Project(tmp_path)
    (tmp_path / "node").mkdir()
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "jobs.toml").write_text(JOBS.replace("FOLDER", str(tmp_path)))
    node = tmp_path / "node"
    for seen in ("*/*/*.cpp", "*/ready/*.graph", "*/ready/index.json"):
        process = project.start("precompile", "pp", TMPDIR=str(node))
        while process.poll() is None and not list(node.glob(f"trainkit-compiled-*/{seen}")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "compiled" / "pp" / "graphs.json").exists()
    done = project.document("precompile", "pp")
    assert done["failed"] == 0 and done["graphs"] == done["compiled"] + done["from_cache"]
    assert [path.name for path in Path(done["archive"]).parent.iterdir()] in (
        ["graphs.json", "graphs.tar"],
        ["graphs.tar", "graphs.json"],
    )
    assert said(project, "pp") == (6, 0)
