"""Unmodified trees of GPT-NeoX, Megatron-LM, Megatron-Bridge and torchtitan over two hosts, by ssh,
pdsh and Slurm: the losses of one machine, also after a host is lost. No tree named: see
tests/engines/real.py."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import wait_for
from tests.engines.real import RealEngine, environment_toml, parameters, write_job

pytestmark = pytest.mark.slow
ENGINES = [
    *parameters("megatron-lm"),
    *parameters("megatron-bridge"),
    *parameters("gpt-neox"),
    *parameters("torchtitan"),
]
ONE_THREAD = '{ OMP_NUM_THREADS = "1" }'


def add_job(project: ClusterProject, real: RealEngine, cluster: str) -> None:
    """The engine's job for two nodes with a rank each, and a cluster `alone` with two ranks."""
    path = project.path / "jobs.toml"
    environment = environment_toml(real)
    text = re.sub(r"\[clusters\.here\]\n(.+\n)+", "", path.read_text())
    text = text.replace(ONE_THREAD, environment)
    alone = f"[clusters.alone]\nranks_per_node = 2\nenv = {environment}\n"
    path.write_text(f"{text}\n{alone}{write_job(project.path, real, cluster, 2)}")


def train_alone(project: ClusterProject) -> dict[int, float]:
    """The losses of one machine."""
    project.invoke("train", "tiny", "--cluster", "alone", "--nodes", "1")
    return project.losses(project.runs()[-1])


def run_with_steps(project: ClusterProject, process: subprocess.Popen[str], number: int) -> Path:
    """The run with this number once it has made six steps."""

    def there() -> Path | None:
        if process.poll() is not None:
            pytest.fail("".join(process.communicate()))
        runs = project.runs()
        if len(runs) < number or not (runs[-1] / "metrics.jsonl").exists():
            return None
        return runs[-1] if len(project.metrics(runs[-1])) >= 6 else None

    run = wait_for(there, "six steps")
    assert isinstance(run, Path)
    return run


@pytest.mark.parametrize("real", ENGINES)
def test_two_hosts_by_ssh_and_pdsh_have_the_losses_of_one(
    head: ClusterProject, cluster: Cluster, real: RealEngine
) -> None:
    add_job(head, real, "pair")
    head.hosts("node1 slots=1", "node2 slots=1", "node3 slots=1")
    expected = train_alone(head)
    head.invoke("train", "tiny", "--foreground")
    assert head.losses(head.runs()[-1]) == pytest.approx(expected, rel=1e-5)

    process = head.start(
        "train", "tiny", "--foreground", "--set", "cluster.launcher=pdsh", "--set",
        "retry.infra=0",
    )  # fmt: skip
    run = run_with_steps(head, process, 3)
    victims = [
        each
        for each in cluster.processes_of(run.name)
        if any("rank/main.py" in word for word in each.argv)
    ]
    cluster.kill(victims[-1], number=signal.SIGKILL)
    process.communicate()
    assert process.returncode == 10
    assert not [each for each in cluster.processes_of(run.name) if each.started]
    head.invoke("resume", run.name, "--foreground")
    assert head.losses(run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("real", ENGINES)
def test_slurm_runs_it_and_goes_on_after_a_requeue(slurm: SlurmProject, real: RealEngine) -> None:
    add_job(slurm, real, "queue")
    expected = train_alone(slurm)
    slurm.edit_jobs("ranks_per_node = 2\nenv", "ranks_per_node = 1\nenv")
    process = slurm.start("train", "tiny")
    run = run_with_steps(slurm, process, 2)
    slurm.cluster.on("head", "scontrol", "requeue", slurm.slurm_jobs(run)[0]["id"])
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert slurm.losses(run) == pytest.approx(expected, rel=1e-5)
