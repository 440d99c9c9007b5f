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


def bring_up(request: pytest.FixtureRequest, folder: Path, what: str, nodes: int = 3, **options: bool) -> Cluster:
    """A cluster; where this machine cannot have one, the test fails or is skipped, as --require-cluster says."""
    try:
        return Cluster(folder / "cluster", nodes, **options)
    except NoCluster as why:
        if request.config.getoption("--require-cluster"):
            pytest.fail(f"--require-cluster: {why}")
        pytest.skip(f"no {what} here: {why}")


@pytest.fixture(scope="session")
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and three nodes."""
    cluster = bring_up(request, tmp_path_factory.mktemp("hosts"), "cluster of namespaces")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(machines: Cluster) -> Iterator[Cluster]:
    """The same for one test, which must leave nothing running on it and all its hosts up."""
    yield machines
    deadline = time.monotonic() + 120
    while (left := machines.strangers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    machines.kill(*left)
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def slurm_machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and three nodes of Slurm's."""
    cluster = bring_up(request, tmp_path_factory.mktemp("slurm"), "Slurm", slurm=True)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def accounting_machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head and two nodes of a Slurm whose controller forgets at once, and whose slurmdbd does not."""
    cluster = bring_up(request, tmp_path_factory.mktemp("accounting"), "Slurm with accounting", 2, slurm=True, accounting=True)
    yield cluster
    cluster.close()


@pytest.fixture
def slurm(tmp_path: Path, slurm_machines: Cluster) -> Iterator[SlurmProject]:
    """A project on Slurm's head for one test, which must leave no job and no process of a run behind."""
    yield from clean_project(tmp_path, slurm_machines)


@pytest.fixture
def accounting(tmp_path: Path, accounting_machines: Cluster) -> Iterator[SlurmProject]:
    """The same where slurmdbd keeps accounts."""
    yield from clean_project(tmp_path, accounting_machines)


def clean_project(folder: Path, cluster: Cluster) -> Iterator[SlurmProject]:
    """A project for one test; fails after it where anything is left."""
    project = make_slurm_project(folder / "project", cluster)
    yield project
    patience = time.monotonic() + 120  # a job is over somewhat later than the run that it was
    while (left := project.jobs()) and time.monotonic() < patience:
        time.sleep(0.1)
    cluster.on("head", "scancel", "--quiet", "--full", *left, "--user=root")
    wait_for(lambda: not project.jobs(), "Slurm to end what the test left", timeout=600)
    strangers = [p for p in cluster.processes() if p.mark or "trainkit" in " ".join(p.argv)]
    cluster.kill(*strangers)
    assert not left and not strangers, f"left behind: {left} {strangers}"


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster) -> ClusterProject:
    """A project on the head with two nodes in its hostfile."""
    return make_project(tmp_path / "project", cluster)
