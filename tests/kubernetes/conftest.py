"""The Kubernetes cluster of these tests: one a worker process of pytest, up when its first test
asks for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from tests.kubernetes.cluster import KubernetesCluster, NoKubernetes
from tests.kubernetes.kube_project import KubeProject, make_kube_project

ON_PAPER = {"kubectl": "kubernetes-client", "openssl": "openssl"}  # commands and their packages
OF_NODES = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "perl": "perl-base"}


def leave_out(request: pytest.FixtureRequest, why: object) -> NoReturn:
    """Fail or skip, as --require-cluster says."""
    if request.config.getoption("--require-cluster"):
        pytest.fail(f"--require-cluster: {why}")
    pytest.skip(f"no Kubernetes cluster here: {why}")


def need(request: pytest.FixtureRequest, commands: Mapping[str, str]) -> None:
    if missing := [package for name, package in commands.items() if shutil.which(name) is None]:
        leave_out(request, f"these packages are missing: {' '.join(missing)}")


@pytest.fixture(scope="session")
def kubectl(request: pytest.FixtureRequest) -> None:
    """What a cluster on paper needs is there."""
    need(request, ON_PAPER)


@pytest.fixture(scope="session")
def kubernetes_machines(
    request: pytest.FixtureRequest, kubectl: None
) -> Iterator[KubernetesCluster]:
    """Three nodes with 8 GPUs each, whose pods are real processes; where this machine cannot have
    them, the test fails or is skipped."""
    need(request, OF_NODES)
    folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
    folder.chmod(0o755)
    assets = os.environ.get("KUBEBUILDER_ASSETS")  # envtest's name
    try:
        cluster = KubernetesCluster(folder, assets=Path(assets) if assets else None)
    except NoKubernetes as why:
        shutil.rmtree(folder, ignore_errors=True)
        leave_out(request, why)
    yield cluster
    cluster.close()
    shutil.rmtree(folder)


@pytest.fixture
def kubernetes(kubernetes_machines: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """The same for one test, which must leave no object and no process behind."""
    kubernetes_machines.begin()
    yield kubernetes_machines
    left = kubernetes_machines.end()
    problems = kubernetes_machines.problems()
    assert not left and not problems, f"left behind: {left}; problems of the stand-in: {problems}"


@pytest.fixture
def paper(tmp_path: Path, kubectl: None) -> Iterator[KubernetesCluster]:
    """A cluster of one test's own whose pods are no processes: they run at once and end by the
    test's word. It needs no root."""
    cluster = KubernetesCluster(tmp_path / "paper", paper=True)
    yield cluster
    cluster.close()
    assert not cluster.problems()


@pytest.fixture
def pods(tmp_path: Path, kubernetes: KubernetesCluster) -> Iterator[KubeProject]:
    """A project. What is left of its runs by the end of the test, JobSets that are over as a rule,
    is deleted."""
    project = make_kube_project(kubernetes.root / tmp_path.name, kubernetes)
    yield project
    for run in project.runs():
        for each in project.jobsets(run):
            if seen := kubernetes.get("jobsets", str(each["name"])):
                kubernetes.client.delete(seen, policy="Background")
