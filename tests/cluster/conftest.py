"""The cluster of these tests: one a worker process of pytest, up when its first test asks for
it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.cluster.machines import Cluster, NoCluster
from tests.cluster.on_head import ClusterProject, Person, make_project
from tests.cluster.slurm_project import SlurmProject, make_slurm_project
from tests.conftest import wait_for


def bring_up(request: pytest.FixtureRequest, what: str, nodes: int = 3, **options: bool) -> Cluster:
    """A cluster, in a folder that ordinary users may pass; where this machine cannot have one,
    the test fails or is skipped, as --require-cluster says."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    try:
        return Cluster(folder, nodes, **options)
    except NoCluster as why:
        shutil.rmtree(folder, ignore_errors=True)
        if request.config.getoption("--require-cluster"):
            pytest.fail(f"--require-cluster: {why}")
        pytest.skip(f"no {what} here: {why}")


@pytest.fixture(scope="session")
def machines(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head and three nodes."""
    cluster = bring_up(request, "cluster of namespaces")
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
def slurm_machines(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head and three nodes of Slurm's."""
    cluster = bring_up(request, "Slurm", slurm=True)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def accounting_machines(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head and two nodes of a Slurm whose controller forgets at once, and whose slurmdbd does
    not."""
    cluster = bring_up(request, "Slurm with accounting", 2, slurm=True, accounting=True)
    yield cluster
    cluster.close()


@pytest.fixture
def slurm(tmp_path: Path, slurm_machines: Cluster) -> Iterator[SlurmProject]:
    """A project on Slurm's head for one test, which must leave no job and no process of a run
    behind."""
    yield from clean_project(tmp_path, slurm_machines)


@pytest.fixture
def accounting(tmp_path: Path, accounting_machines: Cluster) -> Iterator[SlurmProject]:
    """The same where slurmdbd keeps accounts."""
    yield from clean_project(tmp_path, accounting_machines)


def clean_project(folder: Path, cluster: Cluster) -> Iterator[SlurmProject]:
    """A project for one test; fails after it where anything is left."""
    yield from nothing_left(make_slurm_project(folder / "project", cluster))


def nothing_left(project: SlurmProject) -> Iterator[SlurmProject]:
    """The project; fails afterwards where jobs or processes are left."""
    yield project
    cluster = project.cluster
    patience = time.monotonic() + 120  # a job is over somewhat later than the run that it was
    while (left := project.jobs()) and time.monotonic() < patience:
        time.sleep(0.1)
    if left:
        cluster.on("head", "scancel", "--quiet", "--full", *left)
    wait_for(lambda: not project.jobs(), "Slurm to end what the test left", timeout=600)
    strangers = [p for p in cluster.processes() if p.mark or "trainkit" in " ".join(p.argv)]
    cluster.kill(*strangers)
    assert not left and not strangers, f"left behind: {left} {strangers}"


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster) -> ClusterProject:
    """A project on the head with two nodes in its hostfile."""
    return make_project(tmp_path / "project", cluster)


Made = TypeVar("Made", bound=ClusterProject)


@contextlib.contextmanager
def person_project(
    make: Callable[[Path, Cluster, Person], Made], cluster: Cluster, name: str, umask: int
) -> Iterator[Made]:
    """A project of an ordinary user's, in the home that all hosts share; skips where such a user
    cannot get at what it would run."""
    person, folder = Person(name, umask), cluster.folder / "home" / name / "project"
    if why := person.cannot_run(cluster):
        pytest.skip(f"no run of an ordinary user's here: {why}")
    yield make(folder, cluster, person)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def people(cluster: Cluster) -> Iterator[tuple[ClusterProject, ClusterProject]]:
    """Projects of ann, whose umask lets nobody see anything, and of ben, whose umask lets
    everybody do everything."""
    with (
        person_project(make_project, cluster, "ann", 0o077) as ann,
        person_project(make_project, cluster, "ben", 0o000) as ben,
    ):
        yield ann, ben


@pytest.fixture
def slurm_person(slurm_machines: Cluster) -> Iterator[SlurmProject]:
    """A project of ann's on Slurm's head."""
    with person_project(make_slurm_project, slurm_machines, "ann", 0o077) as project:
        yield from nothing_left(project)
