"""Programs that stand for Slurm's: sbatch and scancel write down what they are told, squeue says
what it is told to say. And graphs for them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.programs import put_program
from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.load import load
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.selection import local_hosts
from trainkit.launch.scheduler_contract import Start
from trainkit.launch.slurm.arrays import array_place
from trainkit.launch.slurm.job_graph import GraphPart, StageGraph, stages_folder, submit_graph
from trainkit.plan.planner import make_plan
from trainkit.runs.folder import RunFolder
from trainkit.stages.contract import Need, Unit
from trainkit.stages.in_flight import ArraysInFlight

ARGV = (sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker")
JOBS = """
[clusters.hpc]
launcher = "slurm"
python = "/opt/p/python"
gpus_per_node = 2
[clusters.bare]
launcher = "slurm"
[clusters.hpc.slurm]
account = "lm"
[clusters.hpc.stages.prep-data]
partition = "cpu"
nodes = 4
tasks_per_node = 8
time = "24:00:00"
[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128
[jobs.small]
cluster = "hpc"
model = "tiny"
dataset = "mock"
training = { micro_batch_size = 2, global_batch_size = 4, train_iters = 4, lr = 1e-2 }
[tokenizers.bpe]
type = "bpe"
vocab_size = 300
[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "bpe"
split = "80,20,0"
[models.text]
extends = "tiny"
vocab_size = 384
[jobs.text]
extends = "small"
model = "text"
dataset = "lines"
sample_order = "megatron"
"""


def new_start(resolved: ResolvedJob, project: Path) -> Start:
    """A run whose stages are still to be made."""
    plan = make_plan(resolved.job)
    hosts = local_hosts(resolved.job)
    return Start(resolved.job, resolved.to_json(), plan, hosts, project)


@dataclass
class Slurm:
    """A folder of programs that stand for Slurm's."""

    folder: Path
    job: Job

    def lines(self) -> list[str]:
        """What sbatch and scancel were called with, in order."""
        path = self.folder / "lines"
        return path.read_text().splitlines() if path.exists() else []

    def says(self, *states: str) -> None:
        """What squeue prints: JOB|STATE or JOB|STATE|REASON, a line an element."""
        (self.folder / "states").write_text("".join(f"{line}\n" for line in states))

    def keeps(self, *rows: str) -> None:
        """What sacct prints: JOBID|STATE, a line an element."""
        rest = "|0:0|2026-11-22T10:00:00|2026-11-22T10:00:05|2026-11-22T10:03:00|01:00:00|node1"
        (self.folder / "accounts").write_text("".join(f"{row}{rest}\n" for row in rows))

    @property
    def task(self) -> TaskContext:
        """A task that is called in this project."""
        return TaskContext(json=False, dry_run=False, folder=self.folder)

    def run(self, name: str) -> RunFolder:
        run = RunFolder(self.folder / "runs" / "small" / name)
        (run.path / "launch").mkdir(parents=True)
        run.code.mkdir()
        return run


def make_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The programs, first on PATH, and the job `small`."""
    (tmp_path / "jobs.toml").write_text(JOBS)
    programs = {
        "sbatch": (
            f'echo "sbatch $*" >> {tmp_path}/lines; echo $((100 + $(grep -c ^sbatch'
            f" {tmp_path}/lines)))"
        ),
        "scancel": f'echo "scancel $*" >> {tmp_path}/lines',
        "squeue": (
            f"""jobs=,$(printf '%s\\n' "$@" | sed -n 's/^--jobs=//p'),
awk -F'|' -v jobs=$jobs '{{split($1, id, "_")}}
index(jobs, "," id[1] ",") {{print $1 "|" $2 "|" ($3 ? $3 : "None") "|N/A|1:00|n1"}}' \
{tmp_path}/states"""
        ),
    }
    programs["sacct"] = (
        f"cat {tmp_path}/accounts 2>/dev/null || {{ echo 'Slurm accounting storage is disabled'"
        " >&2; exit 1; }"
    )
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        put_program(tmp_path / "bin", name, f"#!/bin/bash\n{text}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    made = Slurm(tmp_path, load(tmp_path).resolve("small").job)
    made.says()
    return made


def need(name: str, shards: int) -> Need:
    tokens = tuple(Unit(f"tokens-{i}", ARGV, {}) for i in range(shards))
    merge = Unit("merge", ARGV, {}, after=tuple(unit.name for unit in tokens))
    return Need("prep-data", name, name, 1, {}, (), (), (*tokens, merge))


def part(slurm: Slurm, need: Need, shared: ArraysInFlight | None = None) -> GraphPart:
    place = array_place(slurm.job, need.stage, lambda text: None)
    assert place is not None
    return GraphPart(place, need, () if shared else need.units, [], shared)


def submit(
    slurm: Slurm, name: str, *parts: GraphPart, deferred: tuple[str, ...] = ()
) -> tuple[RunFolder, list[str]]:
    run, said = slurm.run(name), list[str]()
    submit_graph(run, slurm.job, StageGraph(parts, deferred), said.append)
    return run, said


def ready(run: RunFolder) -> int:
    """What Slurm would start last before the run: its exit code."""
    program = run.code.resolve() / "trainkit" / "launch" / "slurm" / "finish_stages.py"
    return forkserver.run(
        [sys.executable, "-I", str(program), str(run.path)], stdout=subprocess.DEVNULL, check=False
    ).returncode


def units(run: RunFolder, number: int) -> list[dict[str, Any]]:
    """What the tasks of the graph's array `number` read."""
    level = json.loads(sorted(stages_folder(run).glob("prep-data-*.json"))[number].read_text())
    return [unit for share in level["shares"] for unit in share]
