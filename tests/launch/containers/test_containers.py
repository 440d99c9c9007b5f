"""What starts an agent in a container: the exact words of every runtime, what is mounted, and
what a node says that lacks something."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.conftest import Project
from tests.launch.containers.container_jobs import FOLDER, IMAGES, box, job, session
from trainkit.base.errors import ConfigError
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.jobs.containers import Container
from trainkit.jobs.load import load
from trainkit.launch.containers import check_container, node_container
from trainkit.launch.containers.apptainer import APPTAINER
from trainkit.launch.containers.contract import line
from trainkit.launch.containers.docker import COMMON, DOCKER, leftovers_line
from trainkit.launch.containers.pyxis import pyxis_options
from trainkit.launch.containers.runtimes import RUNTIMES, describe_exit
from trainkit.launch.containers.scripts import HOME_LINE, inside_script
from trainkit.launch.launchers.transports import last_line


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
        check_container(chosen)
    said = str(caught.value)
    assert (
        said.startswith(
            "containers.box cannot mount '/data/a:ro', \"/node'1\", '/corp,us/v1', '/two words',"
            " which the job reads"
        )
        and "a link" in said
    )
    check_container(load(tmp_path).resolve("j", ["dataset=mock"]).job)
    check_container(load(tmp_path).resolve("j", ["container=none", "cluster.root=/data/a:ro"]).job)


def test_train_refuses_them_before_it_makes_a_run(project: Project) -> None:
    project.add_to_jobs(
        '\n[jobs.boxed]\nextends = "random"\ncontainer = "box"\n[containers.box]\nimage ='
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
    """Its tables are some, their other names are there, and each runtime stands in it."""
    text = (Path(__file__).resolve().parents[3] / "docs/containers.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    document, files = map(tomli.loads, blocks)
    for table in (*document["containers"].values(), *files["containers"].values()):
        Container.model_validate(table)
    assert document["jobs"]["big"]["container"] in document["containers"]
    rows = set(re.findall(r"^\| `(\w+)` \|(?:[^|\n]*\|){3}$", text, re.M))
    assert rows == set(IMAGES) == set(RUNTIMES)
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
