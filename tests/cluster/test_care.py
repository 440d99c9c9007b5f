"""Cluster care on real hosts: doctor, nodes --top, setup-hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines import HEAD, Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject


def test_doctor_says_what_differs_and_what_to_do(head: ClusterProject) -> None:
    head.hosts("node1 slots=2", "node2 slots=2", "node3 slots=2", "node9 slots=2")
    python = head.path / "python"
    python.write_text(python.read_text().replace("#!/bin/bash\n", '#!/bin/bash\n[ "$(hostname)" != node3 ] || ulimit -n 512\n'))
    document = head.document("doctor", "--cluster", "pair", exit=7)
    assert [row["host"] for row in document["hosts"]] == ["node1", "node2", "node3"]
    found = {(f["host"], f["what"]): f for f in document["findings"]}
    assert set(found) == {("node9", "reach"), ("node3", "files")}, found
    assert found["node9", "reach"]["wrong"] and "down" in found["node9", "reach"]["advice"] and not found["node3", "files"]["wrong"]
    assert document["wrong"] == 1 and not list((head.path / "sessions").iterdir())
    head.hosts("node1 slots=2", "node2 slots=2")
    out = head.invoke("doctor", "--cluster", "pair").stdout
    assert "nothing is wrong" in out and "10.77.0.11 (eth0)" in out


@pytest.fixture
def slow_cable(cluster: Cluster) -> Iterator[Cluster]:
    """node2's cable carries 25 MB/s in both directions."""
    shape = ("root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "100ms")
    cluster.on(HEAD, "tc", "qdisc", "add", "dev", "node2", *shape)
    cluster.on("node2", "tc", "qdisc", "add", "dev", "eth0", *shape)
    yield cluster
    cluster.on(HEAD, "tc", "qdisc", "del", "dev", "node2", "root")
    cluster.on("node2", "tc", "qdisc", "del", "dev", "eth0", "root")


def test_all_reduce_names_the_slow_host(head: ClusterProject, slow_cable: Cluster) -> None:
    head.hosts("node1", "node2", "node3")
    document = head.document("doctor", "--cluster", "pair", "--all-reduce", exit=7)
    assert len(document["pairs"]) == 3 and all(pair["gb_per_second"] for pair in document["pairs"]), document["pairs"]
    (finding,) = [f for f in document["findings"] if f["wrong"]]
    assert (finding["host"], finding["what"]) == ("node2", "all-reduce") and "usual pair" in finding["message"]


def test_doctor_through_srun(slurm: SlurmProject) -> None:
    slurm.cluster.on(HEAD, "scontrol", "update", "nodename=node3", "state=drain", "reason=fan broken")
    try:
        document = slurm.document("doctor", "--cluster", "queue", exit=7)
    finally:
        slurm.cluster.on(HEAD, "scontrol", "update", "nodename=node3", "state=resume")
    assert [row["host"] for row in document["hosts"]] == ["node1", "node2"]
    (finding,) = [f for f in document["findings"] if f["wrong"]]
    assert finding["host"] == "node3" and "drained: fan broken" in finding["message"] and "resume" in finding["advice"]
