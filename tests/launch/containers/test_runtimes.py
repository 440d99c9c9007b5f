"""What starts an agent in a container: the exact words of every runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.launch.containers.container_jobs import FOLDER, INSIDE, box, job
from trainkit.jobs.load import load
from trainkit.launch.containers import node_container, reusable_since
from trainkit.launch.containers.apptainer import APPTAINER
from trainkit.launch.containers.docker import DOCKER, PODMAN
from trainkit.launch.containers.enroot import ENROOT
from trainkit.launch.containers.pyxis import container_name, pyxis_options, removal_argv
from trainkit.runs.events import AllRanksStarted, AttemptEnded, AttemptStarted, Event, EventLog
from trainkit.runs.folder import RunFolder

OCI = (
    "--rm",
    '--name=trainkit-R-2-"$1"',
    "--label=trainkit.run=R",
    "--pull=never",
    "--entrypoint=/bin/bash",
    "--network=host",
    "--ipc=host",
    "--pid=host",
    "--ulimit=memlock=-1",
    "--ulimit=stack=67108864",
    '--user="$(id -u):$(id -g)"',
    "--workdir=/shared",
)


GROUPS = "$(for group in $(id -G); do echo --group-add=$group; done)"


OCI_REST = (
    *("--env=USER", "--env=LOGNAME", "--env=CUDA_VISIBLE_DEVICES", "--env=A", "--env=B", "--env=C"),
    "--mount=type=bind,source=/shared,target=/shared",
    "--mount=type=bind,source=/data,target=/data,readonly",
    "--mount=type=bind,source=/opt/topo,target=/topo",
)


def test_docker(tmp_path: Path) -> None:
    assert DOCKER.argv(box(tmp_path, "docker")) == (
        "docker",
        "run",
        *OCI,
        GROUPS,
        *OCI_REST,
        "reg/app:1",
        *INSIDE[1:],
    )
    gpus = DOCKER.argv(
        box(
            tmp_path,
            "docker",
            device="cuda",
            gpus=8,
            more='args = ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"]',
        )
    )
    assert gpus == (
        "docker",
        "run",
        *OCI,
        GROUPS,
        "--gpus=all",
        *OCI_REST,
        "--device=/dev/infiniband",
        "--cap-add=IPC_LOCK",
        "reg/app:1",
        *INSIDE[1:],
    )


def test_podman(tmp_path: Path) -> None:
    user = '$([ "$(id -u)" = 0 ] || echo --userns=keep-id --group-add=keep-groups)'
    assert PODMAN.argv(box(tmp_path, "podman")) == (
        "podman",
        "run",
        *OCI,
        user,
        *OCI_REST,
        "reg/app:1",
        *INSIDE[1:],
    )
    assert (
        PODMAN.argv(box(tmp_path, "podman", device="cuda", gpus=1))[15]
        == "--device=nvidia.com/gpu=all"
    )


def test_apptainer(tmp_path: Path) -> None:
    binds = ("--bind=/shared:/shared", "--bind=/data:/data:ro", "--bind=/opt/topo:/topo")
    start = ("apptainer", "exec", "--cleanenv", "--no-home", "--pwd=/shared")
    assert APPTAINER.argv(box(tmp_path, "apptainer")) == (
        *start,
        *binds,
        "/images/app.sif",
        *INSIDE,
    )
    more = 'writable = true\nargs = ["--rocm"]'
    words = APPTAINER.argv(
        box(tmp_path, "apptainer", device="cuda", gpus=4, image="docker://reg/app:1", more=more)
    )
    assert words == (
        *start,
        "--nv",
        "--writable-tmpfs",
        *binds,
        "--rocm",
        "docker://reg/app:1",
        *INSIDE,
    )


def test_enroot(tmp_path: Path) -> None:
    env = ("--env", "A", "--env", "B", "--env", "C")
    visible = "${CUDA_VISIBLE_DEVICES+--env CUDA_VISIBLE_DEVICES}"
    mounts = (
        *("--mount", "/shared:/shared:x-create=auto,rbind"),
        *("--mount", "/data:/data:x-create=auto,rbind,ro"),
        *("--mount", "/opt/topo:/topo:x-create=auto,rbind"),
    )
    rc = ("--rc", f"{FOLDER}/enroot.rc")
    given = box(tmp_path, "enroot")
    assert ENROOT.argv(given) == (
        "enroot",
        "start",
        *rc,
        *env,
        visible,
        *mounts,
        "/images/app.sqsh",
        *INSIDE,
    )
    assert ENROOT.files(given) == {
        "enroot.rc": 'cd /shared && exec "$@"\n'
    } and ENROOT.variables == {"ENROOT_MOUNT_HOME": "no", "ENROOT_LOGIN_SHELL": "no"}
    hooks = (
        "--env",
        "NVIDIA_VISIBLE_DEVICES=all",
        "--env",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )
    words = ENROOT.argv(box(tmp_path, "enroot", device="cuda", gpus=4, more="writable = true"))
    assert words == (
        "enroot",
        "start",
        "--rw",
        *rc,
        *env,
        *hooks,
        visible,
        *mounts,
        "/images/app.sqsh",
        *INSIDE,
    )


def test_pyxis(tmp_path: Path) -> None:
    words = pyxis_options(
        box(
            tmp_path,
            "pyxis",
            launcher="slurm",
            more='writable = true\nargs = ["--container-remap-root"]',
        )
    )
    assert words == (
        "--container-image=/images/app.sqsh",
        "--container-name=trainkit-R-1",
        "--container-mounts=/shared:/shared,/data:/data:ro,/opt/topo:/topo",
        "--container-env=A,B,C",
        "--container-workdir=/shared",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        "--container-writable",
        "--container-remap-root",
    )


def test_pyxis_keeps_a_container_over_attempts_that_began(tmp_path: Path) -> None:
    """One name a run, on every node, so that a retry or a requeue imports nothing; a new one
    after a start that failed, whose import may be half done."""
    run = RunFolder(tmp_path / "runs" / "j" / "R")
    chosen = job(tmp_path, "pyxis", launcher="slurm")
    names = []
    started = AttemptStarted("R", 1, {}, 1)
    ended = AttemptEnded(0, None)
    attempts: list[list[Event]] = [
        [started, AllRanksStarted(), ended],
        [started, AllRanksStarted()],
        [started, ended],
        [started, AllRanksStarted(), ended],
    ]
    for number, events in enumerate(attempts, 1):
        found = node_container(chosen, FOLDER, "R", number, reusable_since(run))
        assert found is not None
        names.append(container_name(found))
        log = EventLog(run.attempt(number))
        for event in events:
            log.write_soon(event)
        log.close()
    assert names == ["trainkit-R-1", "trainkit-R-1", "trainkit-R-1", "trainkit-R-4"]
    assert found is not None
    remove = 'for name; do enroot remove --force "$name"; done'
    assert removal_argv(replace(found, since=2), 8) == (
        *(
            "srun",
            "--nodes=8",
            "--ntasks=8",
            "--ntasks-per-node=1",
            "--overlap",
            "--input=none",
            "--mpi=none",
            "--time=1",
        ),
        *("/bin/bash", "-c", remove, "remove", "pyxis_trainkit-R-1", "pyxis_trainkit-R-2"),
    )
    own = box(tmp_path, "pyxis", launcher="slurm", more='args = ["--container-name=mine"]')
    assert not any("trainkit-R" in word for word in pyxis_options(own)) and not removal_argv(own, 8)


def test_the_environment_of_ranks(tmp_path: Path) -> None:
    """The job's over the container's over the cluster's; around the runtime only what its hooks
    may read and what cannot change the runtime."""
    chosen = job(tmp_path, "docker")
    assert chosen.environment == {
        "A": "2",
        "PATH": "/opt/bin:/bin",
        "HERE": "${node:USER}",
        "B": "two words",
        "C": "3",
    }
    assert dict(box(tmp_path, "docker").env) == {"A": "2", "B": "two words", "C": "3"}
    more = [
        "HOME",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "DOCKER_HOST",
        "CONTAINERS_CONF",
        "CONTAINER_HOST",
        "LD_BIND_NOW",
        "SLURM_MPI_TYPE",
        "NVIDIA_VISIBLE_DEVICES",
    ]
    changed = node_container(
        load(tmp_path).resolve("j", [f'env.{name}="x"' for name in more]).job, FOLDER, "R", 2
    )
    assert changed is not None and set(changed.env) == {
        "A",
        "B",
        "C",
        "NVIDIA_VISIBLE_DEVICES",
    }, "the client is the host's"
