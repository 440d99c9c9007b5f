"""Ranks of two nodes in an image, each in a copy on its own disk: over ssh, and, in the one that
this checkout's container/Dockerfile.cpu gives, on Slurm too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import wait_for
from tests.engines.stand_ins.trees import CHECKOUT
from tests.images.cpu import CpuProject
from tests.launch.containers.entered_image import MARK, entered_image

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


def add_image(project: ClusterProject, prolog: Sequence[str], lines: str, cluster: str) -> None:
    """The job of the project in an image, which is copied to each node.

    Args:
        prolog: the cluster's.
        lines: of [containers.box].
        cluster: on which the job runs.
    """
    path = project.path / "jobs.toml"
    text = path.read_text().replace(
        f"[clusters.{cluster}]", f"[clusters.{cluster}]\nprolog = {json.dumps(prolog)}"
    )
    text = text.replace("[jobs.random]", '[jobs.random]\ncontainer = "box"')
    path.write_text(f'{text}\n[containers.box]\n{lines}stage_to = "{LOCAL}"\n')


def add_cpu_image(project: ClusterProject, built: CpuProject, cluster: str) -> None:
    """The same in the image of container/Dockerfile.cpu."""
    lines = f'image = "{built.image}"\nruntime = "enroot"\n'
    add_image(project, [f"export PATH={built.lab.programs}:$PATH"], lines, cluster)


def copies(cluster: Cluster) -> dict[str, list[str]]:
    """What lies on each node's own disk: name and inode."""
    return {
        node: cluster.on(node, "find", LOCAL, "-name", "*.sqsh", "-printf", "%f %i\n").splitlines()
        for node in NODES
    }


def check_copies(cluster: Cluster, image: Path) -> None:
    """One whole copy on each node; removes them."""
    size = image.stat().st_size
    for node, names in copies(cluster).items():
        assert len(names) == 1, (node, names)
        name = names[0].split()[0]
        assert int(cluster.on(node, "stat", "--format=%s", f"{LOCAL}/{name}")) == size
        cluster.on(node, "rm", "-rf", LOCAL)


def make_local(cluster: Cluster) -> None:
    for node in NODES:
        cluster.on(node, "mkdir", LOCAL)


def test_ranks_start_in_a_copy_on_each_node(
    head: ClusterProject, cluster: Cluster, tmp_path: Path
) -> None:
    """Really entered over ssh: a file that only the image has is there. Its ranks do without
    torch; what the image of container/Dockerfile.cpu holds is tests/images/test_cpu_image.py's."""
    image = entered_image(tmp_path / "image")
    head.hosts("node1 slots=1", "node2 slots=1")
    head.ranks_do(f"""
        import os
        assert os.path.exists("{MARK}")
        beat(3)
        done()
        """)
    lines = image.table(stages_in_container=False, python=f"{head.path}/python")
    lines = lines.replace('mounts = ["', f'mounts = ["{CHECKOUT}:{CHECKOUT}:ro", "')
    add_image(head, json.loads(image.prolog), lines, "pair")
    make_local(cluster)
    head.invoke("train", "random")
    run = head.runs()[-1]
    wait_for(lambda: not cluster.processes_of(run.name), "nothing to be left")
    check_copies(cluster, image.file)


@pytest.mark.slow  # 35 s of CPU: two ranks import torch, 900 MB are copied twice
@pytest.mark.timeout(3600)
def test_over_ssh(head: ClusterProject, cluster: Cluster, cpu_image: CpuProject) -> None:
    add_cpu_image(head, cpu_image, "pair")
    head.hosts("node1 slots=1", "node2 slots=1")  # each rank imports torch
    make_local(cluster)
    head.invoke("train", "random", *SHORT)
    run = head.runs()[-1]
    assert sorted(head.losses(run)) == [1, 2, 3]
    wait_for(lambda: not cluster.processes_of(run.name), "nothing to be left")
    check_copies(cluster, cpu_image.image)


@pytest.mark.slow  # 20 s of CPU; images on Slurm's nodes: test_engine_stand_ins.py too
@pytest.mark.timeout(3600)
def test_on_slurm(slurm: SlurmProject, cpu_image: CpuProject) -> None:
    add_cpu_image(slurm, cpu_image, "queue")
    for node in slurm.cluster.nodes:
        slurm.cluster.on(node, "mkdir", LOCAL)
    run, _ = slurm.submit(*SHORT)
    slurm.wait_state(run, "succeeded", timeout=300)
    assert sorted(slurm.losses(run)) == [1, 2, 3]
    listed = {node: slurm.cluster.on(node, "ls", LOCAL) for node in slurm.cluster.nodes}
    for node in slurm.cluster.nodes:
        slurm.cluster.on(node, "rm", "-rf", LOCAL)
    assert sum(".sqsh" in names for names in listed.values()) == 2, listed
