"""Cluster care on real hosts: doctor, nodes --top, setup-hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.machines import HEAD, Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject


def test_doctor_says_what_differs_and_what_to_do(head: ClusterProject) -> None:
    head.hosts("node1 slots=2", "node2 slots=2", "node3 slots=2", "node9 slots=2")
    python = head.path / "python"
    python.write_text(
        python.read_text().replace(
            "#!/bin/bash\n", '#!/bin/bash\n[ "$(hostname)" != node3 ] || ulimit -n 512\n'
        )
    )
    document = head.document("doctor", "--cluster", "pair", exit=7)
    assert [row["host"] for row in document["hosts"]] == ["node1", "node2", "node3"]
    found = {(f["host"], f["what"]): f for f in document["findings"]}
    assert set(found) == {("node9", "reach"), ("node3", "files")}, found
    assert (
        found["node9", "reach"]["wrong"]
        and "down" in found["node9", "reach"]["advice"]
        and not found["node3", "files"]["wrong"]
    )
    assert document["wrong"] == 1 and not list((head.path / "sessions").iterdir())
    head.hosts("node1 slots=2", "node2 slots=2")
    out = head.invoke("doctor", "--cluster", "pair").stdout
    assert "nothing is wrong" in out and "10.77.0.11 (eth0)" in out


def test_top_runs_once_on_each_host(head: ClusterProject) -> None:
    head.hosts("node1", "node2", "node9")
    document = head.document("nodes", "--cluster", "pair", "--top", exit=7)
    rows = {row["host"]: row for row in document["hosts"]}
    assert document["command"][0] == "top" and "No route" in rows["node9"]["error"]
    for host in ("node1", "node2"):  # its own processes: few, and `top` is one of them
        lines = (rows[host]["text"] or "").splitlines()
        assert (
            rows[host]["error"] is None
            and "load average" in lines[0]
            and any(line.split()[-1:] == ["top"] for line in lines)
        ), rows[host]


@pytest.fixture
def slow_cable(cluster: Cluster) -> Iterator[Cluster]:
    """node2's cable carries 25 MB/s in both directions."""
    shape = ("root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "100ms")
    cluster.on(HEAD, "tc", "qdisc", "add", "dev", "node2", *shape)
    cluster.on("node2", "tc", "qdisc", "add", "dev", "eth0", *shape)
    yield cluster
    cluster.on(HEAD, "tc", "qdisc", "del", "dev", "node2", "root")
    cluster.on("node2", "tc", "qdisc", "del", "dev", "eth0", "root")


@pytest.mark.slow
def test_all_reduce_names_the_slow_host(head: ClusterProject, slow_cable: Cluster) -> None:
    head.hosts("node1", "node2", "node3")
    document = head.document("doctor", "--cluster", "pair", "--all-reduce", exit=7)
    assert len(document["pairs"]) == 3 and all(
        pair["gb_per_second"] for pair in document["pairs"]
    ), document["pairs"]
    (finding,) = [f for f in document["findings"] if f["wrong"]]
    assert (finding["host"], finding["what"]) == (
        "node2",
        "all-reduce",
    ) and "usual pair" in finding["message"]


def test_doctor_through_srun(slurm: SlurmProject) -> None:
    slurm.cluster.on(
        HEAD, "scontrol", "update", "nodename=node3", "state=drain", "reason=fan broken"
    )
    try:
        document = slurm.document("doctor", "--cluster", "queue", exit=7)
    finally:
        slurm.cluster.on(HEAD, "scontrol", "update", "nodename=node3", "state=resume")
    assert [row["host"] for row in document["hosts"]] == ["node1", "node2"]
    (finding,) = [f for f in document["findings"] if f["wrong"]]
    assert (
        finding["host"] == "node3"
        and "drained: fan broken" in finding["message"]
        and "resume" in finding["advice"]
    )


@pytest.fixture
def bare(cluster: Cluster) -> Iterator[Cluster]:
    """Root has a home of each host's own, and node1 and node2 take its keys too."""
    for host in (HEAD, "node1", "node2"):
        cluster.on(
            host,
            "sh",
            "-c",
            "sed -i 's#:/root:#:/run/root:#' /etc/passwd && mkdir -p -m 700 /run/root",
        )
    for host in ("node1", "node2"):
        own = (
            "s#^AuthorizedKeysFile .*#AuthorizedKeysFile .ssh/authorized_keys"
            " /etc/ssh/authorized_keys#"
        )
        cluster.on(
            host,
            "sh",
            "-c",
            # it writes the file again when it listens (sshd.c, after server_listen)
            f"sed -i '{own}' /etc/ssh/sshd_config && p=$(cat /run/sshd.pid) && rm /run/sshd.pid"
            " && kill -HUP $p && until [ -s /run/sshd.pid ]; do sleep 0.02; done",
        )
    yield cluster
    back = "[ ! -f /etc/ssh/00-cluster.conf ] || mv /etc/ssh/00-cluster.conf /etc/ssh/ssh_config.d/"
    cluster.on(
        HEAD, "sh", "-c", f"sed -i 's#:/run/root:#:/root:#' /etc/passwd; rm -rf /run/root; {back}"
    )
    for host in ("node1", "node2"):  # their /etc is made anew
        cluster.crash(host)
        cluster.boot(host)


def test_setup_hosts_makes_strangers_let_us_in(head: ClusterProject, bare: Cluster) -> None:
    (head.path / "hostfile").unlink()
    words = (
        "setup-hosts",
        "--cluster",
        "pair",
        "--host",
        "node1",
        "--host",
        "node2",
        "--slots",
        "2",
        "--perform",
    )
    made = json.loads(head.invoke(*words, "--json", HOME="/run/root").stdout)
    assert [(step["where"], step["state"]) for step in made["steps"]] == [
        (w, "changed") for w in ("here", "node1", "node2", "here")
    ], made
    assert (head.path / "hostfile").read_text() == "node1 slots=2\nnode2 slots=2\n"
    again = json.loads(head.invoke(*words, "--json", HOME="/run/root").stdout)
    assert {step["state"] for step in again["steps"]} == {"already"}
    # the cluster's own key is forgotten: only the new one is left, where ssh looks by itself
    for host in ("node1", "node2"):
        bare.on(host, "rm", "/etc/ssh/authorized_keys")
    bare.on(HEAD, "mv", "/etc/ssh/ssh_config.d/00-cluster.conf", "/etc/ssh/00-cluster.conf")
    assert bare.on(HEAD, "ssh", "-oBatchMode=yes", "node2", "hostname").strip() == "node2"
    bare.on("node2", "rm", "/run/root/.ssh/authorized_keys")
    failed = head.invoke(*words, exit=7, HOME="/run/root").stdout
    assert (
        "node2: accepts this machine's key (~/.ssh/authorized_keys): failed: " in failed
        and "Permission denied" in failed
    )
    assert (
        "| ssh node2 'cat >> ~/.ssh/authorized_keys'" in failed
        and "node1: accepts this machine's key (~/.ssh/authorized_keys): already" in failed
    )
