"""What starts an agent in a container: the exact words of every runtime, what is mounted, and
what a node says that lacks something."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import tomli

import trainkit
from tests.conftest import Project
from tests.launch.supervised import DONE, Program, make_run, supervised
from trainkit.base.errors import ConfigError
from trainkit.engines import refuse_unlaunchable
from trainkit.jobs.containers import Container
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.agent.host_report import extension_error
from trainkit.launch.containers import NodeContainer, check_mounts, node_container, reusable_since
from trainkit.launch.containers.apptainer import APPTAINER
from trainkit.launch.containers.contract import line
from trainkit.launch.containers.docker import COMMON, DOCKER, PODMAN, leftovers_line
from trainkit.launch.containers.enroot import ENROOT
from trainkit.launch.containers.pyxis import container_name, pyxis_options, removal_argv
from trainkit.launch.containers.scripts import HOME_LINE, describe_exit, inside_script
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.transports import last_line
from trainkit.launch.session import Session, new_session
from trainkit.launch.supervise.agent_pool import JoinedAgent
from trainkit.launch.supervise.host_consistency import host_inconsistencies
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import EventLog

JOBS = """
[clusters.c]
launcher = "{launcher}"
device = "{device}"
root = "/shared"
gpus_per_node = {gpus}
env = {{ A = "1", PATH = "/opt/bin:/bin", HERE = "${{node:USER}}" }}
prolog = ["module load {runtime}"]
[containers.box]
image = "{image}"
runtime = "{runtime}"
mounts = ["/data:/data:ro", "/opt/topo:/topo"]
env = {{ A = "2", B = "two words" }}
{more}
[models.m]
num_layers = 1
hidden_size = 8
num_attention_heads = 1
seq_length = 8
vocab_size = 16
[tokenizers.t]
type = "file"
path = "t.json"
[datasets.outside]
source = "indexed"
prefixes = {prefixes}
tokenizer = "t"
[jobs.j]
cluster = "c"
model = "m"
dataset = "{dataset}"
container = "box"
training = {{ train_iters = 1, lr = 1.0 }}
env = {{ C = "3" }}
"""
IMAGES = {
    "docker": "reg/app:1",
    "podman": "reg/app:1",
    "apptainer": "/images/app.sif",
    "enroot": "/images/app.sqsh",
    "pyxis": "/images/app.sqsh",
}
FOLDER = Path("/shared/runs/j/R/launch/attempt-2")
INSIDE = ("/bin/bash", f"{FOLDER}/inside.sh", '"$1"')


def job(tmp_path: Path, runtime: str, **values: Any) -> Job:
    given = {
        "launcher": "ssh",
        "device": "cpu",
        "gpus": 0,
        "more": "",
        "prefixes": "[]",
        "dataset": "mock",
        "image": IMAGES[runtime],
        **values,
    }
    if given["prefixes"] == "[]":
        given["prefixes"] = '["/shared/x/*"]'
    (tmp_path / "jobs.toml").write_text(JOBS.format(runtime=runtime, **given))
    return load(tmp_path).resolve("j", []).job


def box(tmp_path: Path, runtime: str, **values: Any) -> NodeContainer:
    found = node_container(job(tmp_path, runtime, **values), FOLDER, "R", 2)
    assert found is not None
    return found


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
    } and ENROOT.variables == {"ENROOT_MOUNT_HOME": "no"}
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
    for number, words in enumerate(
        (
            ["started", "go", "ended"],
            ["started", "go"],
            ["started", "ended"],
            ["started", "go", "ended"],
        ),
        1,
    ):
        found = node_container(chosen, FOLDER, "R", number, reusable_since(run))
        assert found is not None
        names.append(container_name(found))
        log = EventLog(run.attempt(number))
        for word in words:
            log.note(word)
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


def sources(tmp_path: Path, more: str = "", prefixes: str = "[]", **values: Any) -> list[str]:
    return [
        m.text
        for m in box(
            tmp_path, "docker", more=more, prefixes=prefixes, dataset="outside", **values
        ).mounts
    ]


def test_a_job_can_be_freed_of_its_container(tmp_path: Path) -> None:
    job(tmp_path, "pyxis")
    text = (tmp_path / "jobs.toml").read_text()
    (tmp_path / "jobs.toml").write_text(
        text.replace("[containers.box]", "[containers.none]").replace(
            'container = "box"', 'container = "none"'
        )
    )
    with pytest.raises(
        ConfigError,
        match=r"\[containers.none\]: container = 'none' is what a job says that runs without one",
    ) as caught:
        load(tmp_path).resolve("j", [])
    assert "give the table another name" in str(caught.value) and len(load(tmp_path).check()) == 1
    (tmp_path / "jobs.toml").write_text(text)
    free = load(tmp_path).resolve("j", ["container=none"]).job
    assert (
        free.container is None
        and node_container(free, FOLDER, "R", 2) is None
        and free.environment["A"] == "1"
    )
    with pytest.raises(ConfigError, match="has no table to go to"):
        load(tmp_path).resolve("j", ["container=none", "container.image=x"])


def test_what_a_job_reads_is_mounted(tmp_path: Path) -> None:
    ends = ["/data:/data:ro", "/opt/topo:/topo"]
    assert sources(tmp_path) == ["/shared:/shared", *ends], "below the root"
    assert sources(tmp_path, prefixes='["/corpus/{00..29}/a*/x_text_document", "/other/y"]')[
        -30:-28
    ] == ["/corpus/00:/corpus/00", "/corpus/01:/corpus/01"]
    assert "/other:/other" in sources(tmp_path, prefixes='["/corpus/*/x", "/other/y"]')
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    found = node_container(
        job(tmp_path, "docker").model_copy(
            update={"cluster": load(tmp_path).resolve("j", [f"cluster.root={linked}"]).job.cluster}
        ),
        FOLDER,
        "R",
        2,
    )
    assert found is not None and {str(linked), str(tmp_path)} <= {m.source for m in found.mounts}, (
        "the code's real path is asked for too"
    )
    node = node_container(
        load(tmp_path).resolve("j", ["cluster.node_folder=/local/me"]).job, FOLDER, "R", 2
    )
    assert node is not None and "/local/me:/local/me" in [m.text for m in node.mounts]
    wide = (
        load(tmp_path)
        .resolve("j", ['container.mounts=["/shared/..:/x", "/:/host:ro", "/shared:/shared"]'])
        .job
    )
    assert [m.text for m in node_container(wide, FOLDER, "R", 2).mounts] == [  # type: ignore[union-attr]
        "/shared/..:/x",
        "/:/host:ro",
        "/shared:/shared",
    ]


@pytest.mark.parametrize(
    ("given", "root", "order"),
    [
        (["/data:/data:ro"], "/data/me", ["/data:/data:ro", "/data/me:/data/me"]),
        (["/scratch:/mnt"], "/mnt/shared/t", ["/scratch:/mnt", "/mnt/shared/t:/mnt/shared/t"]),
        (
            ["/a:/b/c/d", "/a:/b", "/x:/b/c/../..:ro"],
            "/b/c",
            ["/x:/b/c/../..:ro", "/a:/b", "/b/c:/b/c", "/a:/b/c/d"],
        ),
    ],
)
def test_no_mount_hides_another(
    tmp_path: Path, given: list[str], root: str, order: list[str]
) -> None:
    """pyxis, enroot and apptainer mount in the order of the words: what is mounted above a
    folder later hides it."""
    job(tmp_path, "pyxis")
    chosen = (
        load(tmp_path)
        .resolve(
            "j",
            [
                f"container.mounts={given}".replace("'", '"'),
                f"cluster.root={root}",
                "cluster.node_folder=/dev/shm",
            ],
        )
        .job
    )
    found = node_container(chosen, FOLDER, "R", 2)
    assert found is not None and [mount.text for mount in found.mounts] == order
    assert f"--container-mounts={','.join(order)}" in pyxis_options(found)
    assert [word for word in APPTAINER.argv(found) if word.startswith("--bind")] == [
        f"--bind={text}" for text in order
    ]


def test_paths_that_no_runtime_can_mount_are_refused_before_the_start(tmp_path: Path) -> None:
    job(
        tmp_path,
        "docker",
        prefixes='["/corp,us/v1/x", "/ok/y", "/two words/*/z"]',
        dataset="outside",
    )
    chosen = (
        load(tmp_path).resolve("j", ["cluster.root=/data/a:ro", "cluster.node_folder=/node'1"]).job
    )
    with pytest.raises(ConfigError) as caught:
        check_mounts(chosen)
    said = str(caught.value)
    assert (
        said.startswith(
            "containers.box cannot mount '/data/a:ro', \"/node'1\", '/corp,us/v1', '/two words',"
            " which the job reads"
        )
        and "a link" in said
    )
    check_mounts(load(tmp_path).resolve("j", ["dataset=mock"]).job)
    check_mounts(load(tmp_path).resolve("j", ["container=none", "cluster.root=/data/a:ro"]).job)


def test_train_refuses_them_before_it_makes_a_run(project: Project) -> None:
    path = project.path / "jobs.toml"
    path.write_text(
        path.read_text()
        + '\n[jobs.boxed]\nextends = "random"\ncontainer = "box"\n[containers.box]\nimage ='
        ' "app"\nruntime = "docker"\n'
    )
    said = project.invoke(
        "train", "boxed", "--set", f"cluster.node_folder={project.path.parent}/a b", exit=3
    )
    assert (
        f"containers.box cannot mount '{project.path.parent}/a b'" in said.stderr + said.stdout
        and not project.runs()
    )


@pytest.mark.parametrize(
    ("runtime", "image", "said"),
    [
        ("docker", "/a/b.sqsh", "[REGISTRY/]IMAGE[:TAG]"),
        ("docker", "docker://app", "[REGISTRY/]IMAGE[:TAG]"),
        ("podman", "nvcr.io#nvidia/pytorch:25.03-py3", "[REGISTRY/]IMAGE[:TAG]"),
        ("enroot", "nvcr.io#nvidia/pytorch:25.03-py3", "enroot import"),
        ("apptainer", "/a/b.sqsh", ".sif"),
        ("pyxis", "/a/b.sif", "a path to a .sqsh or .squashfs file, or [REGISTRY#]IMAGE[:TAG]"),
        ("pyxis", "nvcr.io/nvidia/pytorch:25.03-py3", "nvcr.io#nvidia/pytorch:25.03-py3"),
    ],
)
def test_images_that_a_runtime_cannot_take(
    tmp_path: Path, runtime: str, image: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job(tmp_path, runtime, image=image)
    assert said in str(caught.value) and "image = " in str(caught.value)


@pytest.mark.parametrize(
    ("runtime", "image"),
    [
        ("pyxis", "nvcr.io#nvidia/pytorch:25.03-py3"),
        ("pyxis", "docker://nvcr.io#nvidia/pytorch:25.03-py3"),
        ("pyxis", "/a/pytorch+25.03+py3.sqsh"),
        ("pyxis", "ubuntu:24.04"),
        ("docker", "localhost:5000/app@sha256:00ff"),
        ("apptainer", "oras://reg/app:1"),
        ("apptainer", "/images/sandbox/"),
        ("enroot", "/images/app.squashfs"),
    ],
)
def test_images_as_each_runtime_names_them(tmp_path: Path, runtime: str, image: str) -> None:
    chosen = job(tmp_path, runtime, image=image, launcher="slurm").container
    assert chosen is not None and chosen.image == image


@pytest.mark.parametrize(
    "mount", ["/a", "a:/b", "/a:b", "/a:/b:rw", "/a b:/c", "/a,x:/b", "~/a:/b"]
)
def test_mounts_are_absolute_and_need_no_quoting(tmp_path: Path, mount: str) -> None:
    job(tmp_path, "docker")
    path = tmp_path / "jobs.toml"
    path.write_text(path.read_text().replace('"/data:/data:ro"', f'"{mount}"'))
    with pytest.raises(ConfigError, match="mounts"):
        load(tmp_path).resolve("j", [])


def test_the_guide_to_containers() -> None:
    """Its table is one, its other names are there, and each runtime stands in it."""
    text = (Path(__file__).resolve().parents[3] / "docs/containers.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    document = tomli.loads(block)
    for table in document["containers"].values():
        Container.model_validate(table)
    assert document["jobs"]["big"]["container"] in document["containers"]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(IMAGES)
    for word in (*COMMON, "--pull=never"):
        assert word in text


def test_pyxis_needs_srun(tmp_path: Path) -> None:
    refuse_unlaunchable(job(tmp_path, "pyxis", launcher="slurm"))
    for runtime in ("docker", "podman", "apptainer", "enroot"):
        for launcher in ("local", "ssh", "pdsh", "slurm"):
            refuse_unlaunchable(job(tmp_path, runtime, launcher=launcher))
    with pytest.raises(
        ConfigError, match="runtime = 'pyxis' is a part of srun, and launcher = 'pdsh'"
    ):
        refuse_unlaunchable(job(tmp_path, "pyxis", launcher="pdsh"))


def session(tmp_path: Path, runtime: str, **values: Any) -> Session:
    chosen = job(tmp_path, runtime, **values)
    folder = tmp_path / "s"
    return new_session(
        folder,
        "R",
        2,
        [Host("h")],
        chosen.cluster,
        tmp_path / "code",
        tmp_path / "logs",
        {},
        node_container(chosen, folder, "R", 2),
    )


def test_node_sh(tmp_path: Path) -> None:
    text = session(tmp_path, "podman").scripts()["node.sh"].splitlines()
    assert text[2:5] == [
        "set -e",
        "module load podman",
        (
            'command -v podman > /dev/null || { echo "$HOSTNAME has no podman, the runtime of'
            ' containers.box" >&2; exit 8; }'
        ),
    ]
    assert text[-5:-1] == [
        "export A=2",
        "export B='two words'",
        "export C=3",
        leftovers_line("podman"),
    ] and text[-1].startswith("exec podman run --rm ")
    assert text[-1].endswith(f'{tmp_path}/s/inside.sh "$1"')
    assert set(session(tmp_path, "enroot").scripts()) == {"node.sh", "inside.sh", "enroot.rc"}
    assert set(session(tmp_path, "pyxis").scripts()) == {"inside.sh"}


def test_inside_sh(tmp_path: Path) -> None:
    text = inside_script(
        box(
            tmp_path,
            "docker",
            more='python = "/opt/py/bin/python3"\nprolog = ["source /opt/env.sh"]',
        ),
        ["-I", "-S", "/code/agent.py", "/s"],
        "export MARK=1",
    )
    assert text.splitlines()[2:] == [
        "set -e",
        HOME_LINE,
        "source /opt/env.sh",
        (
            'command -v /opt/py/bin/python3 > /dev/null || { echo "$HOSTNAME: the image has no'
            ' /opt/py/bin/python3 (containers.box.python)" >&2; exit 8; }'
        ),
        "export MARK=1",
        'exec /opt/py/bin/python3 -I -S /code/agent.py /s "$1"',
    ]


def test_a_word_is_quoted_unless_the_node_has_to_read_it(tmp_path: Path) -> None:
    said = line(DOCKER.argv(box(tmp_path, "docker", more='args = ["--label=a b;\'c\'", "$(id)"]')))
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {said}", "x", "7"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert (
        "--label=a b;'c'" in shown
        and "$(id)" in shown
        and "--name=trainkit-R-2-7" in shown
        and f"--user={os.getuid()}:{os.getgid()}" in shown
    )


@pytest.mark.parametrize(
    ("code", "last", "said"),
    [
        (
            125,
            "docker: no such image",
            "docker ended with 125 (it could not start the container): docker: no such image",
        ),
        (
            126,
            "permission denied",
            "docker ended with 126 (a program in the image cannot be run): permission denied",
        ),
        (127, "", "docker ended with 127 (a program is not in the image): without a word"),
    ],
)
def test_what_the_clients_exit_codes_mean(tmp_path: Path, code: int, last: str, said: str) -> None:
    assert describe_exit(box(tmp_path, "docker"), code, last) == said


def test_dockers_last_line_is_no_error(tmp_path: Path) -> None:
    """Recorded from docker 20.10 and 28.2."""
    log = tmp_path / "log"
    for usage in ("See 'docker run --help'.", "\nRun 'docker run --help' for more information"):
        log.write_text(f"docker: Error response from daemon: No such image: app:latest.\n{usage}\n")
        assert last_line(log) == "docker: Error response from daemon: No such image: app:latest."


# Runtimes that enter no container: they record their words and run what follows the image, with the
# environment that the real one would give it
# (apptainer-exec(1), enroot's start: all of the host's unless --cleanenv; none but what --env
# names). Home is one that is not there.
FAKE = """#!/bin/bash
printf '%s\\n' "$@" > {folder}/words
env=()
for word in "$@"; do
    [ "$word" != --cleanenv ] || {{ env=(-i PATH=/usr/bin:/bin); for name in ${{!APPTAINERENV_@}}; do env+=("${{name#APPTAINERENV_}}=${{!name}}"); done; }}
done
[ "$1" != start ] || env=(-i PATH=/usr/bin:/bin)
while [ "$1" != {image} ]; do
    if [ "$1" = --env ]; then case "$2" in *=*) env+=("$2") ;; *) env+=("$2=${{!2}}") ;; esac; fi
    shift
done
shift
exec env "${{env[@]}}" HOME=/no/such/home "$@"
"""


def run_in(
    tmp_path: Path,
    runtime: str,
    more: str = "",
    *,
    python: str = sys.executable,
    sets: Sequence[str] = (),
) -> RunFolder:
    """A run whose agent the fake runtime starts."""
    program = tmp_path / "bin" / runtime
    program.parent.mkdir()
    program.write_text(FAKE.format(folder=tmp_path, image=IMAGES[runtime]))
    program.chmod(0o755)
    table = (
        f'image = "{IMAGES[runtime]}"\nruntime = "{runtime}"\npython = "{python}"\nenv = {{ IN ='
        f' "the box" }}\n{more}'
    )
    prolog = [
        f"export PATH={program.parent}:$PATH",
        "export LD_AUDIT= CONDA_PREFIX=/host CUDA_VISIBLE_DEVICES=3 APPTAINERENV_SITE=own",
    ]
    return make_run(tmp_path, [f"cluster.prolog={json.dumps(prolog)}", *sets], container=table)


@pytest.mark.parametrize("runtime", ["apptainer", "enroot"])
def test_ranks_run_where_the_runtime_leads(tmp_path: Path, runtime: str) -> None:
    """The environment is the image's and the job's, not the host's; what the job sets is there
    before the agent is, which the prolog sees."""
    run = run_in(tmp_path, runtime, 'prolog = ["export SEEN=$IN"]')
    names = ("HOME", "IN", "SEEN", "CONDA_PREFIX", "LD_AUDIT", "A_SECRET", "SITE")
    outcome, _ = supervised(
        run, Program(DONE + f"print([os.environ.get(name) for name in {names}])")
    )
    assert outcome.exit == 0, outcome.root_cause
    site = "own" if runtime == "apptainer" else None
    home = f"/tmp/home-{os.getuid()}"
    assert ast.literal_eval(run.attempt(1).log(0).read_text().strip()) == [
        home,
        "the box",
        "the box",
        None,
        None,
        None,
        site,
    ]
    words = (tmp_path / "words").read_text().splitlines()
    assert words[0] == ("exec" if runtime == "apptainer" else "start") and words[-3:] == [
        "/bin/bash",
        f"{run.session(1)}/inside.sh",
        "0",
    ]


def test_secrets_are_no_variables_of_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach ranks as always, and no script or word has them."""
    monkeypatch.setenv("A_SECRET", "hush-hush")
    run = run_in(
        tmp_path,
        "apptainer",
        'prolog = ["export SEEN=$(printenv A_SECRET || echo nothing)"]',
        sets=['cluster.secrets=["A_SECRET"]'],
    )
    outcome, _ = supervised(
        run,
        Program(DONE + "print(os.environ.get('SEEN'), len(os.environ['A_SECRET']))"),
        secrets={"A_SECRET": "hush-hush"},
    )
    assert outcome.exit == 0, outcome.root_cause
    assert run.attempt(1).log(0).read_text().strip() == "nothing 9"
    texts = [path.read_text() for path in (*run.session(1).glob("*.sh"), tmp_path / "words")]
    assert len(texts) == 3 and not any("hush-hush" in text or "A_SECRET=" in text for text in texts)


def test_a_home_that_is_another_users(tmp_path: Path) -> None:
    """Caches hold code: one that somebody else made is not taken."""
    line = HOME_LINE.replace("/tmp/home-", f"{tmp_path}/home-")
    home = tmp_path / f"home-{os.getuid()}"
    shown = subprocess.run(
        ["bash", "-ec", f'{line}\necho "$HOME"'],
        env={"HOME": "/no/such"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(home) and home.stat().st_mode & 0o777 == 0o700
    kept = subprocess.run(
        ["bash", "-ec", f'{line}\necho "$HOME"'],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert kept.stdout.strip() == str(tmp_path)
    home.rmdir()
    home.symlink_to("/proc/1/nobody's")
    refused = subprocess.run(
        ["bash", "-ec", f"{line}\necho on"],
        env={"HOME": "/no/such"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        refused.returncode == 8 and "cannot be the home of" in refused.stderr and not refused.stdout
    )


def test_mounts_that_are_not_there_are_named_before_any_rank_starts(tmp_path: Path) -> None:
    run = run_in(
        tmp_path, "apptainer", f'mounts = ["/no/such:/x", "{tmp_path}:/y", "/not/there:/z:ro"]'
    )
    outcome, told = supervised(run, Program(DONE))
    cause = outcome.root_cause
    assert (
        outcome.exit == 8
        and cause is not None
        and "what containers.box mounts: /no/such /not/there" in cause["message"]
    ), cause
    assert os.uname().nodename in cause["message"] and "watch.connect" in cause["advice"]
    assert not any(e["event"] == "rank_started" for e in told) and not (tmp_path / "words").exists()


def test_a_python_that_is_not_in_the_image(tmp_path: Path) -> None:
    outcome, _ = supervised(run_in(tmp_path, "apptainer", python="/no/python3"), Program(DONE))
    assert outcome.exit == 8 and "the image has no /no/python3 (containers.box.python)" in str(
        outcome.root_cause
    )


def test_a_runtime_that_is_not_on_the_node(tmp_path: Path) -> None:
    run = make_run(tmp_path, container='image = "/images/app.sqsh"\nruntime = "enroot"')
    outcome, _ = supervised(run, Program(DONE))
    assert outcome.exit == 8 and "has no enroot, the runtime of containers.box" in str(
        outcome.root_cause
    )


def test_code_compiled_for_another_python(tmp_path: Path) -> None:
    assert extension_error(tmp_path) is None, "nothing is compiled"
    (tmp_path / "_index.cpython-38-x86_64-linux-gnu.so").write_bytes(b"")
    said = extension_error(tmp_path)
    assert (
        said is not None
        and "_index.cpython-38-x86_64-linux-gnu.so is for another Python than 3." in said
    )
    (tmp_path / f"_index{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert "_index" in str(extension_error(tmp_path)), "the linker's own words"
    given = session(tmp_path, "docker")
    facts = {
        "nonce": given.nonce,
        "snapshot": given.code.name,
        "extension": said,
        "executable": "/usr/bin/python3",
    }
    ((host, problem),) = host_inconsistencies([JoinedAgent(0, "h", facts, 0.0)], given, 0)
    assert host == "h" and problem.startswith(
        "its Python of reg/app:1 (/usr/bin/python3) cannot load the code's compiled part:"
        " _index.cpython-38"
    )


def test_a_python_that_is_too_old_says_so() -> None:
    """Told so by a newer one: the check must come before anything that an old one cannot read."""
    agent = Path(trainkit.__file__).parent / "launch" / "agent" / "main.py"
    code = (
        f"import runpy, sys; sys.version_info = (3, 8, 10); runpy.run_path({str(agent)!r},"
        " run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        done.returncode != 0
        and "3.11 is needed: clusters.X.python, containers.X.python" in done.stderr
        and "Traceback" not in done.stderr
    )
    ast.parse(agent.read_text(), feature_version=(3, 7))
