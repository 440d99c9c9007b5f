"""Stages as Slurm arrays: the same bytes as here; a run and its stages are one graph; one unit
that fails is named, and only it and what comes after it is run again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import HEAD
from tests.cluster.slurm_project import SlurmProject
from tests.cluster.test_stages import TEXT, made, write_corpus, write_crawl
from tests.conftest import HANGS, wait_for
from tests.stages.curation_project import below

STAGES = """
[clusters.queue.stages.prep-data]
nodes = 2
tasks_per_node = 2
partition = "urgent"
[clusters.queue.slurm]
time = 30
"""
# Ranks that end at once; its order of samples is another stage, whose need is not known before the
# tokens are there.
QUICK = """
[jobs.quick]
cluster = "queue"
model = "text"
dataset = "lines"
nodes = 2
sample_order = "megatron"
training = { micro_batch_size = 2, global_batch_size = 8, train_iters = 4, lr = 1e-2 }
"""


def arrays(project: SlurmProject, shards: int, lines: int) -> None:
    write_corpus(project, shards, lines)
    project.edit_jobs('cluster = "pair"\nmodel = "text"', 'cluster = "queue"\nmodel = "text"')
    # the first shard alone
    project.edit_jobs("vocab_size = 300", "vocab_size = 300\ntraining_bytes = 1000")
    project.edit_jobs(TEXT.partition("[tokenizers")[0], STAGES)


def test_arrays_prepare_the_same_bytes_and_one_that_fails_is_named(slurm: SlurmProject) -> None:
    arrays(slurm, 5, 60)
    # of other tests
    before = set(
        slurm.cluster.on(HEAD, "squeue", "--noheader", "--states=all", "--format=%A").split()
    )
    broken = slurm.path / "corpus" / "part-03.jsonl"
    text = broken.read_text()
    broken.write_text(text.replace("\n", "\nno JSON at all\n", 1))
    dry = slurm.invoke("prep-data", "--job", "text", "--dry-run").stdout
    assert (
        "#SBATCH --partition=urgent" in dry
        and "#SBATCH --array=0-1" in dry
        and "#SBATCH --time=30" in dry
        and slurm.jobs() == []
    )
    failed = slurm.invoke("prep-data", "--job", "text", exit=6)
    assert re.search(r"part-03.jsonl:2: tokens-00003 on node[123]: is not JSON", failed.stderr), (
        failed.stderr
    )
    graph = [line for line in failed.stdout.splitlines() if line.startswith("job ")]
    assert [line.partition(": ")[2].partition(": ")[2].partition(",")[0] for line in graph] == [
        "1 unit in 1 x 1 task",
        "5 units in 2 x 2 tasks",
        "1 unit in 1 x 1 task",
    ]
    assert "after job" not in graph[0] and all("has gone well" in line for line in graph[1:]), graph
    slurm.wait_over()  # what cannot run any more is taken out of the queue
    broken.write_text(text)
    again = slurm.invoke("prep-data", "--job", "text").stdout
    graph = [line for line in again.splitlines() if line.startswith("job ")]
    # the broken shard alone, and what joins them
    assert len(graph) == 2 and all("1 unit in 1 x 1 task" in line for line in graph), again
    ours = [
        line.split()[1]
        for line in slurm.cluster.on(
            HEAD, "squeue", "--noheader", "--states=all", "--format=%A %P"
        ).splitlines()
        if line.split()[0] not in before
    ]
    assert ours and set(ours) == {"urgent"}
    by_slurm = made(slurm)
    slurm.edit_jobs('cluster = "queue"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    slurm.invoke("prep-data", "--job", "text", "--force")
    assert by_slurm == made(slurm) and len(by_slurm) >= 3


@pytest.mark.slow
def test_arrays_curate_the_same_bytes(slurm: SlurmProject) -> None:
    """Passes, keys, what compares them: each an array that waits for the one before."""
    write_crawl(slurm, 3)
    slurm.edit_jobs('cluster = "pair"\nmodel = "text"', 'cluster = "queue"\nmodel = "text"')
    slurm.edit_jobs(TEXT.partition("[tokenizers")[0], STAGES)
    slurm.invoke("prep-data", "--job", "text")
    by_slurm = below(slurm, "lines")
    slurm.edit_jobs('cluster = "queue"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    slurm.invoke("prep-data", "--job", "text", "--force")
    assert below(slurm, "lines") == by_slurm


def quick(project: SlurmProject) -> None:
    """A job over the same dataset whose ranks have nothing to do."""
    with open(project.path / "jobs.toml", "a") as file:
        file.write(QUICK)
    project.ranks_do("beat(4); done()")


def stage_jobs(run: Path) -> list[dict[str, Any]]:
    """The jobs of a run's graph but for its own."""
    jobs = json.loads((run / "launch" / "stages" / "jobs.json").read_text())["jobs"]
    assert isinstance(jobs, list)
    return jobs


def test_a_run_and_its_stages_are_one_graph(slurm: SlurmProject) -> None:
    """Whoever typed `train` is killed as soon as all is submitted; a second run waits for the
    same arrays; losses are those of one machine. One rank a node: each imports torch, and
    test_slurm_runs.py has more."""
    arrays(slurm, 3, 60)
    slurm.edit_jobs("ranks_per_node = 2", "ranks_per_node = 1")
    slurm.edit_jobs("ranks_per_node = 4", "ranks_per_node = 2")
    quick(slurm)
    dry = slurm.invoke("train", "text", "--dry-run").stdout
    assert (
        "sbatch --parsable --dependency=afterok:text-ready --kill-on-invalid-dep=yes" in dry
        and "launch/slurm/finish_stages.py" in dry
        and dry.count("#!/bin/bash -l") == 4
    )
    assert not slurm.runs() and not slurm.jobs()
    following = slurm.start("train", "text")
    wait_for(
        lambda: bool(slurm.runs()) and (slurm.runs()[0] / "launch" / "slurm.json").exists(),
        "the graph to be submitted",
        timeout=HANGS,
    )
    following.send_signal(signal.SIGKILL)
    following.communicate()
    (first,) = slurm.runs()
    said = slurm.invoke("train", "quick", "--detach").stdout
    second = next(run for run in slurm.runs() if run != first)
    ours, theirs = stage_jobs(first), stage_jobs(second)
    assert len(ours) == 4 and [job["id"] for job in theirs if not job["own"]] == [
        job["id"] for job in ours[:3]
    ], said
    assert (
        [job["name"] for job in theirs if job["own"]] == ["quick-ready"]
        and f"of run {first.name} make it" in said
        and "makes index" in said
    )
    for run in (first, second):
        slurm.wait_state(run, "succeeded")
    id = slurm.slurm_jobs(first)[0]["id"]
    wait_for(lambda: slurm.job_state(id) == "COMPLETED", "the batch job to end", timeout=HANGS)
    assert slurm.document("status", id)["run"] == first.name, "by Slurm's number too"
    again = slurm.invoke("train", "text", "--cluster", "here", "--nodes", "1", timeout=HANGS).stdout
    assert re.search(r"prep-data lines--bpe is fresh", again), again
    local = next(run for run in slurm.runs() if run.parent == first.parent and run != first)
    assert slurm.losses(first) == slurm.losses(local) and len(slurm.losses(first)) == 4
    assert json.loads((first / "plan.json").read_text())["vocab_size"] and not list(
        (slurm.path / "stamps" / "prep-data").glob("*.making.json")
    )


def test_a_unit_of_the_graph_fails_and_cancel_takes_all_out(slurm: SlurmProject) -> None:
    arrays(slurm, 3, 60)
    quick(slurm)
    broken = slurm.path / "corpus" / "part-01.jsonl"
    text = broken.read_text()
    broken.write_text(text.replace("\n", "\nno JSON at all\n", 1))
    failed = slurm.invoke("train", "quick", exit=6, timeout=HANGS)
    assert re.search(r"part-01.jsonl:2: tokens-00001 on node[123]: is not JSON", failed.stdout), (
        failed.stdout + failed.stderr
    )
    (run,) = slurm.runs()
    cause = slurm.document("why", run.name)["root_cause"]
    assert cause["unit"] == "tokens-00001" and cause["host"] in ("node1", "node2", "node3")
    slurm.wait_over()  # what cannot run any more is taken out of the queue
    assert f"invoke train {run.parent.name}" in slurm.document("status", run.name)["next"]
    slurm.invoke("resume", run.name, exit=5)
    broken.write_text(text)
    said = slurm.invoke("train", "quick", "--detach").stdout
    graph = [line for line in said.splitlines() if line.startswith("job ")]
    # the broken shard alone, what joins them, the plan
    assert len(graph) == 3 and all("1 unit in 1 x 1 task" in line for line in graph[:2]), said
    assert slurm.document("cancel", "quick", exit=15)["state"] == "cancelled"
    slurm.wait_over()
    assert slurm.document("status", "quick")["exit"] == 15
    slurm.invoke("train", "quick", timeout=HANGS)
    assert slurm.document("status", "quick")["state"] == "succeeded"


@pytest.mark.slow
def test_an_element_whose_node_crashes_is_put_back(slurm: SlurmProject) -> None:
    """Nobody is there to type it again: Slurm starts the element anew, and the run comes after
    it as if nothing had been."""
    arrays(slurm, 4, 6000)
    quick(slurm)
    slurm.invoke("train", "quick", "--detach")
    (run,) = slurm.runs()
    second = stage_jobs(run)[1]["id"]

    def where() -> str:
        lines = slurm.cluster.on(
            HEAD,
            "squeue",
            "--noheader",
            "--array",
            "--states=RUNNING",
            f"--jobs={second}",
            "--format=%N",
        ).split()
        return lines[0] if lines else ""

    node = wait_for(where, "an element to run", timeout=HANGS)
    slurm.cluster.crash(node)
    try:
        wait_for(
            lambda: "PENDING" in slurm.job_state(second),
            "the element to be put back",
            timeout=HANGS,
        )
    finally:
        slurm.cluster.boot(node)
    slurm.wait_state(run, "succeeded")
