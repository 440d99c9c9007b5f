"""The cluster of these tests: one a worker process of pytest, up when its first test asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, NoCluster
from tests.cluster.on_head import ClusterProject, make_project
from tests.cluster.slurm_project import SlurmProject, make_slurm_project
from tests.conftest import wait_for


@pytest.fixture(scope="session")
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and three nodes."""
    try:
        cluster = Cluster(tmp_path_factory.mktemp("hosts") / "cluster")
    except NoCluster as why:
        if request.config.getoption("--require-cluster"):
            pytest.fail(f"--require-cluster: {why}")
        pytest.skip(f"no cluster of namespaces here: {why}")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(machines: Cluster) -> Iterator[Cluster]:
    """The same for one test, which must leave nothing running on it and all its hosts up."""
    yield machines
    deadline = time.monotonic() + 5
    while (left := machines.strangers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    machines.kill(*left)
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def slurm_machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and three nodes of Slurm's."""
    try:
        cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster", slurm=True)
    except NoCluster as why:
        if request.config.getoption("--require-cluster"):
            pytest.fail(f"--require-cluster: {why}")
        pytest.skip(f"no Slurm here: {why}")
    yield cluster
    cluster.close()


@pytest.fixture
def slurm(tmp_path: Path, slurm_machines: Cluster) -> Iterator[SlurmProject]:
    """A project on Slurm's head for one test, which must leave no job and no process of a run behind."""
    project = make_slurm_project(tmp_path / "project", slurm_machines)
    yield project
    left = project.jobs()
    slurm_machines.on("head", "scancel", "--quiet", "--full", *left, "--user=root")
    wait_for(lambda: not project.jobs(), "Slurm to end what the test left", timeout=60)
    strangers = [p for p in slurm_machines.processes() if p.mark or "trainkit" in " ".join(p.argv)]
    slurm_machines.kill(*strangers)
    assert not left and not strangers, f"left behind: {left} {strangers}"


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster) -> ClusterProject:
    """A project on the head with two nodes in its hostfile."""
    return make_project(tmp_path / "project", cluster)
