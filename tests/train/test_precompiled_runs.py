"""Runs whose graphs were compiled by one process before: every rank finds all of them."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import TASKS, Project
from tests.launch.containers.entered_image import entered_image
from trainkit.base.locks import locked
from trainkit.jobs.load import load
from trainkit.train.compiled_graphs import graph_fields, node_folder

JOBS = """
[clusters.here]
ranks_per_node = 4

[models.small]
family = "llama"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
seq_length = 16
vocab_size = 64
rotary_base = BASE

[jobs.tp]
cluster = "here"
model = "small"
dataset = "mock"
precompile = true
parallelism = { tensor_model_parallel_size = 2, sequence_parallel = true }

[jobs.tp.env]
OMP_NUM_THREADS = "2"  # not what ranks would share
TORCHINDUCTOR_CACHE_DIR = "FOLDER"  # of what is compiled without ready-made graphs

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


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Of a model of its own: nodes' folders are named by what graphs are made for."""
    (tmp_path / "tasks.py").write_text(TASKS)
    base = 10_000 + secrets.randbelow(10**6)
    jobs = JOBS.replace("BASE", str(base)).replace("FOLDER", str(tmp_path / "cache"))
    (tmp_path / "jobs.toml").write_text(jobs)
    return Project(tmp_path)


@contextmanager
def on_this_node(project: Project, job: str) -> Iterator[Path]:
    """Where a node unpacks the graphs of a job; gone afterwards."""
    folder = node_folder(graph_fields(load(project.path).resolve(job, []).job))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink(missing_ok=True)


def said(project: Project, *words: str) -> tuple[int, int]:
    """Hits and misses of all ranks of a new run."""
    project.invoke("train", *words, "--share")  # whoever else uses this machine
    found = SAID.search(logs(project))
    assert found, logs(project)
    return int(found[1]), int(found[2])


def logs(project: Project) -> str:
    """What the newest run wrote."""
    return "".join(path.read_text() for path in project.runs()[-1].rglob("*.log"))


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_every_rank_finds_every_graph(layout: str, project: Project) -> None:
    """Tensor-parallel 2 x data-parallel 2, and two stages of two; nothing is compiled."""
    with on_this_node(project, layout) as node:
        done = project.document("precompile", layout)
        assert done["failed"] == 0 and done["graphs"] == done["compiled"] + done["from_cache"]
        # of 4 ranks a block without a backward, for the evaluation, and its forward and backward
        assert said(project, layout) == (12, 0)
        warm = project.losses(project.runs()[-1])
        again = project.document("precompile", layout)
        assert again["fresh"] and again["compiled"] == 0 and again["seconds_saved"] > 0
        archive = Path(done["archive"])
        found = archive.stat()
        content = bytearray(archive.read_bytes())
        content[len(content) // 2] ^= 1
        archive.write_bytes(content)
        os.utime(archive, ns=(found.st_atime_ns, found.st_mtime_ns))  # the stage sees nothing
        shutil.rmtree(node)
        assert said(project, layout)[1] > 0, "a damaged archive is a miss"
        assert f"{archive} is damaged" in logs(project)
        assert project.losses(project.runs()[-1]) == warm, "what a cold compilation computes"


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
def test_graphs_of_a_job_in_an_image_are_made_there(project: Project, tmp_path: Path) -> None:
    """By its compiler, which is another than this machine's: the prolog inside says which."""
    box = entered_image(tmp_path / "image")
    path = project.path / "jobs.toml"
    text = path.read_text().replace("[clusters.here]", f"[clusters.here]\nprolog = {box.prolog}")
    text = text.replace("[jobs.tp]\n", '[jobs.tp]\ncontainer = "box"\n')
    table = box.table(prolog=["export CXX=/usr/bin/g++ PATH=/usr/bin"])
    path.write_text(f"{text}\n[containers.box]\n{table}")
    assert not project.document("precompile", "tp")["fresh"]
    assert said(project, "tp") == (12, 0)


@pytest.mark.slow  # compiles C++ for some minutes of CPU time
def test_a_killed_compilation_leaves_nothing_half(project: Project) -> None:
    """As it begins to compile, and with graphs made."""
    with on_this_node(project, "pp") as node:
        record = project.path / "compiled" / "pp" / "graphs.json"
        for seen in ("*/*.cpp", "ready/*.graph"):
            process = project.start("precompile", "pp")
            while process.poll() is None and not list(node.glob(seen)):
                time.sleep(0.01)
            assert process.poll() is None, "it was done before"
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            with locked(node.with_suffix(".lock"), {}):  # its worker has ended too
                assert not record.exists()
        done = project.document("precompile", "pp")
        assert done["failed"] == 0 and not done["fresh"]
        assert sorted(path.name for path in record.parent.iterdir()) == [
            "graphs.json",
            "graphs.tar",
        ]
        assert said(project, "pp") == (12, 0)
