"""Containers over ssh, and an imitation of pyxis on a real Slurm: two nodes, two ranks each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import oci
from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import wait_for
from tests.images.made_files import pretend_squashfs
from tests.oci import IMAGE, Oci
from tests.programs import put_program

NODES = ("node1", "node2")
# runc wants cgroups; a node of these has none mounted
CGROUPS = """
mount -t tmpfs tmpfs /sys/fs/cgroup
for names in $(cut -d: -f2 /proc/self/cgroup | grep .); do
    mkdir -p "/sys/fs/cgroup/${names#name=}" &&
        mount -t cgroup -o "$names" cgroup "/sys/fs/cgroup/${names#name=}"
done
"""
SHORT = (
    "--set",
    "training.train_iters=8",
    "--set",
    "training.eval_iters=0",
    "--set",
    "cluster.watch.connect=60",
    "--set",
    "cluster.watch.start=300",
)
CONF = (
    '[storage]\ndriver = "overlay"\ngraphroot = "/srv/podman/store"\nrunroot ='
    ' "/srv/podman/state"\n'
)


@pytest.fixture
def podman(cluster: Cluster, tmp_path: Path) -> Iterator[Oci]:
    """podman on two nodes, each with a store of its own that holds the image."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("needs podman and runc")
    (tmp_path / "image.tar").write_bytes(oci.rootfs())
    (tmp_path / "storage.conf").write_text(CONF)
    (tmp_path / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    variables = {
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        "CONTAINERS_CONF": str(tmp_path / "containers.conf"),
    }
    for node in NODES:
        cluster.on(node, "bash", "-c", CGROUPS)
        cluster.on(
            node,
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            "podman",
            "import",
            str(tmp_path / "image.tar"),
            IMAGE,
        )
    yield Oci("podman", variables)
    for node in NODES:
        cluster.on(
            node,
            "bash",
            "-c",
            "umount /srv/podman/store/overlay; umount -R /sys/fs/cgroup; rm -rf /srv/podman",
        )


def add_box(project: ClusterProject, table: str, prolog: str = "[]") -> None:
    """`boxed`: the job of the project in a container."""
    path = project.path / "jobs.toml"
    text = path.read_text().replace('launcher = "ssh"', f'launcher = "ssh"\nprolog = {prolog}')
    path.write_text(
        f'{text}\n[jobs.boxed]\nextends = "random"\ncontainer = "box"\n\n[containers.box]\n{table}'
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_podman_over_ssh(head: ClusterProject, cluster: Cluster, podman: Oci) -> None:
    add_box(head, podman.table(), podman.prolog)
    for name in ("random", "boxed"):
        head.invoke("train", name, *SHORT, timeout=600)
    plain, inside = head.runs()
    assert head.losses(inside) == head.losses(plain)
    wait_for(lambda: not cluster.processes_of(inside.name), "nothing to be left")
    head.edit_jobs('"/usr:/usr:ro"', '"/usr:/usr:ro", "/srv/only-here:/mnt:ro"')
    cluster.on("node1", "mkdir", "-p", "/srv/only-here")
    done = head.invoke("train", "boxed", *SHORT, exit=8, timeout=600)
    said = done.stdout + done.stderr
    assert (
        "1 of 2 hosts are without an agent" in said
        and "node2 does not have what containers.box mounts: /srv/only-here" in said
    )


# srun of a Slurm without pyxis: it takes pyxis's options out, notes them, and starts the real one;
# the task then runs on the node itself.
SRUN = """#!/bin/bash
words=()
for word in "$@"; do
    case "$word" in
        --container-*|--no-container-*) echo "$word" >> {folder}/options ;;
        *) words+=("$word") ;;
    esac
done
exec {srun} "${{words[@]}}"
"""


@pytest.mark.timeout(1200)
def test_the_steps_of_pyxis(slurm: SlurmProject, tmp_path: Path) -> None:
    """What is real here: both steps, their scripts and environment, on a real Slurm. What is
    not: the container."""
    srun = shutil.which("srun")
    assert srun is not None
    put_program(tmp_path / "bin", "srun", SRUN.format(folder=tmp_path, srun=srun))
    slurm.ranks_count(10)
    slurm.may_end()
    path = slurm.path / "jobs.toml"
    text = path.read_text().replace(
        "[clusters.queue]", f'[clusters.queue]\nprolog = ["export PATH={tmp_path}/bin:$PATH"]'
    )
    image = pretend_squashfs(slurm.path / "app.sqsh")
    table = {
        "image": str(image),
        "runtime": "pyxis",
        "python": f"{slurm.path}/python",
        "mounts": ["/srv/topo:/topo:ro"],
    }
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    path.write_text(
        f'{text}container = "box"\n\n[containers.box]\n{lines}env = {{ IN_BOX = "two words" }}\n'
    )
    slurm.cluster.on("node1", "mkdir", "-p", "/srv/topo")

    shown = slurm.invoke("train", "random", "--dry-run").stdout
    assert f"--container-image={image}" in shown and "mounts.sh" in shown and "inside.sh" in shown
    run, _ = slurm.submit("--set", "retry.infra=0")
    slurm.wait_state(run, "failed")
    cause = slurm.events(run, 1)["ended"]["root_cause"]["message"]
    missing = [
        node
        for node in ("node1", "node2", "node3")
        if f"{node} does not have what containers.box mounts: /srv/topo" in cause
    ]
    assert missing and "node1" not in missing and not (tmp_path / "options").exists(), (
        "no container was tried"
    )

    for node in ("node2", "node3"):
        slurm.cluster.on(node, "mkdir", "-p", "/srv/topo")
    run, _ = slurm.submit()
    slurm.wait_state(run, "succeeded", timeout=600)
    assert (tmp_path / "options").read_text().splitlines() == [
        f"--container-image={image}",
        f"--container-name=trainkit-{run.name}-1",
        f"--container-mounts=/srv/topo:/topo:ro,{slurm.path}:{slurm.path}",
        "--container-env=OMP_NUM_THREADS,IN_BOX,RANK_DOES",
        f"--container-workdir={slurm.path}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]
    assert slurm.count() == 10
