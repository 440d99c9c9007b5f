"""Two nodes train in the image that this checkout's container/Dockerfile.cpu gives, each in a
copy on its own disk: over ssh, and on Slurm."""

from __future__ import annotations

import json

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import wait_for
from tests.images.cpu import CpuProject

NODES = ("node1", "node2")
LOCAL = "/srv/images"  # a node's own disk
SHORT = (
    "--set",
    "training.train_iters=3",
    "--set",
    "training.eval_iters=0",
    "--set",
    "training.save_interval=3",
)


def add_image(project: ClusterProject, built: CpuProject, cluster: str) -> None:
    """The job of the project in the image, which is copied to each node."""
    path = project.path / "jobs.toml"
    prolog = json.dumps([f"export PATH={built.lab.programs}:$PATH"])
    text = path.read_text().replace(
        f"[clusters.{cluster}]", f"[clusters.{cluster}]\nprolog = {prolog}"
    )
    text = text.replace("[jobs.random]", '[jobs.random]\ncontainer = "box"')
    image = f'image = "{built.image}"\nruntime = "enroot"\nstage_to = "{LOCAL}"\n'
    path.write_text(f"{text}\n[containers.box]\n{image}")


def copies(cluster: Cluster) -> dict[str, list[str]]:
    """What lies on each node's own disk: name and inode."""
    return {
        node: cluster.on(node, "find", LOCAL, "-name", "*.sqsh", "-printf", "%f %i\n").splitlines()
        for node in NODES
    }


@pytest.mark.timeout(3600)
def test_over_ssh(head: ClusterProject, cluster: Cluster, cpu_image: CpuProject) -> None:
    add_image(head, cpu_image, "pair")
    head.hosts("node1 slots=1", "node2 slots=1")  # each rank imports torch
    for node in NODES:
        cluster.on(node, "mkdir", LOCAL)
    head.invoke("train", "random", *SHORT)
    run = head.runs()[-1]
    assert sorted(head.losses(run)) == [1, 2, 3]
    wait_for(lambda: not cluster.processes_of(run.name), "nothing to be left")
    first = copies(cluster)
    assert all(len(names) == 1 for names in first.values()), first
    size = cpu_image.image.stat().st_size
    for node in NODES:
        name = first[node][0].split()[0]
        assert int(cluster.on(node, "stat", "--format=%s", f"{LOCAL}/{name}")) == size
        cluster.on(node, "rm", "-rf", LOCAL)


@pytest.mark.slow  # 20 s of CPU; images on Slurm's nodes: test_engine_stand_ins.py too
@pytest.mark.timeout(3600)
def test_on_slurm(slurm: SlurmProject, cpu_image: CpuProject) -> None:
    add_image(slurm, cpu_image, "queue")
    for node in slurm.cluster.nodes:
        slurm.cluster.on(node, "mkdir", LOCAL)
    run, _ = slurm.submit(*SHORT)
    slurm.wait_state(run, "succeeded", timeout=300)
    assert sorted(slurm.losses(run)) == [1, 2, 3]
    listed = {node: slurm.cluster.on(node, "ls", LOCAL) for node in slurm.cluster.nodes}
    for node in slurm.cluster.nodes:
        slurm.cluster.on(node, "rm", "-rf", LOCAL)
    assert sum(".sqsh" in names for names in listed.values()) == 2, listed
