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
from tests.oci import IMAGE, Oci

NODES = ("node1", "node2")
CONF = '[storage]\ndriver = "overlay"\ngraphroot = "/srv/podman/store"\nrunroot = "/srv/podman/state"\n'


@pytest.fixture
def podman(cluster: Cluster, tmp_path: Path) -> Iterator[Oci]:
    """podman on two nodes, each with a store of its own that holds the image."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("needs podman and runc")
    (tmp_path / "image.tar").write_bytes(oci.rootfs())
    (tmp_path / "storage.conf").write_text(CONF)
    (tmp_path / "containers.conf").write_text('[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n')
    variables = {"CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"), "CONTAINERS_CONF": str(tmp_path / "containers.conf")}
    for node in NODES:
        cluster.on(node, "env", *(f"{name}={value}" for name, value in variables.items()), "podman", "import", str(tmp_path / "image.tar"), IMAGE)
    yield Oci("podman", variables)
    for node in NODES:
        cluster.on(node, "bash", "-c", "umount /srv/podman/store/overlay; rm -rf /srv/podman")


def add_box(project: ClusterProject, table: str, prolog: str = "[]") -> None:
    """`boxed`: the job of the project in a container."""
    path = project.path / "jobs.toml"
    text = path.read_text().replace('launcher = "ssh"', f'launcher = "ssh"\nprolog = {prolog}')
    path.write_text(f'{text}\n[jobs.boxed]\nextends = "random"\ncontainer = "box"\n\n[containers.box]\n{table}')


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_podman_over_ssh(head: ClusterProject, cluster: Cluster, podman: Oci) -> None:
    add_box(head, podman.table(), podman.prolog)
    head.invoke("train", "random")
    head.invoke("train", "boxed")
    plain, inside = head.runs()
    assert head.losses(inside) == head.losses(plain)
    assert not cluster.processes_of(inside.name)
    path = head.path / "jobs.toml"
    path.write_text(path.read_text().replace("/usr:/usr:ro", "/srv/only-here:/usr:ro"))
    cluster.on("node1", "mkdir", "-p", "/srv/only-here")
    done = head.invoke("train", "boxed", exit=8)
    said = done.stdout + done.stderr
    assert "1 of 2 hosts are without an agent" in said and "node2 does not have what containers.box mounts: /srv/only-here" in said


# srun of a Slurm without pyxis: it takes pyxis's options out, notes them, and starts the real one; the task then runs on the node itself.
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


@pytest.mark.timeout(300)
def test_the_steps_of_pyxis(slurm: SlurmProject, tmp_path: Path) -> None:
    """What is real here: both steps, their scripts and environment, on a real Slurm. What is not: the container."""
    srun = shutil.which("srun")
    assert srun is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN.format(folder=tmp_path, srun=srun))
    (tmp_path / "bin" / "srun").chmod(0o755)
    path = slurm.path / "jobs.toml"
    text = path.read_text().replace("[clusters.queue]", f'[clusters.queue]\nprolog = ["export PATH={tmp_path}/bin:$PATH"]')
    table = {"image": "/images/app.sqsh", "runtime": "pyxis", "python": f"{slurm.path}/python", "mounts": ["/srv/topo:/topo:ro"]}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    path.write_text(f'{text}container = "box"\n\n[containers.box]\n{lines}env = {{ IN_BOX = "two words" }}\n')
    slurm.cluster.on("node1", "mkdir", "-p", "/srv/topo")

    shown = slurm.invoke("train", "random", "--dry-run").stdout
    assert "--container-image=/images/app.sqsh" in shown and "mounts.sh" in shown and "inside.sh" in shown
    run, _ = slurm.submit("--set", "retry.infra=0")
    slurm.wait_state(run, "failed")
    cause = slurm.events(run, 1)["ended"]["root_cause"]["message"]
    missing = [node for node in ("node1", "node2", "node3") if f"{node} does not have what containers.box mounts: /srv/topo" in cause]
    assert missing and "node1" not in missing and not (tmp_path / "options").exists(), "no container was tried"

    for node in ("node2", "node3"):
        slurm.cluster.on(node, "mkdir", "-p", "/srv/topo")
    run, _ = slurm.submit()
    slurm.wait_state(run, "succeeded")
    assert (tmp_path / "options").read_text().splitlines() == [
        "--container-image=/images/app.sqsh",
        f"--container-mounts={slurm.path}:{slurm.path},/srv/topo:/topo:ro",
        "--container-env=OMP_NUM_THREADS,IN_BOX",
        f"--container-workdir={slurm.path}",
        "--no-container-mount-home",
    ]
    assert json.loads(slurm.invoke("status", run.name, "--json").stdout)["step"] == 30
