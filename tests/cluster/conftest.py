"""The cluster of these tests: one a worker process of pytest, up when its first test asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, NoCluster
from tests.cluster.on_head import ClusterProject, make_project


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


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster) -> ClusterProject:
    """A project on the head with two nodes in its hostfile."""
    return make_project(tmp_path / "project", cluster)
