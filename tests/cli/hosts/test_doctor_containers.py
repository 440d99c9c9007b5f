"""What doctor says of containers: its judgement without any, what its program sees of a node, and
a container that is really started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.conftest import Project
from tests.launch.containers.container_jobs import job
from tests.launch.containers.entered_image import entered_image
from trainkit.launch.cluster_care import container_probe
from trainkit.launch.cluster_care.container_checks import (
    ContainerReport,
    RuntimeFolder,
    find_container_problems,
)
from trainkit.launch.containers.pyxis import pyxis_options
from trainkit.launch.containers.runtimes import RUNTIMES

GIB = 2**30
PROBE = Path(trainkit.__file__).parent / "launch" / "cluster_care" / "container_probe.py"
FOLDER = RuntimeFolder("/f", True, "ext4", "/dev/sda1", False, False, 900 * GIB, None, None)
NAMES = ("ENROOT_RUNTIME_PATH", "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH")
FINE = ContainerReport(
    "n0",
    "box",
    "pyxis",
    "/images/app.sqsh",
    path="/usr/bin/enroot",
    version="3.5.0",
    size=20 * GIB,
    id=str(20 * GIB),
    folders=dict.fromkeys(NAMES, FOLDER),
    seconds=(4.0, 1.0),
)


def said(tmp_path: Path, *reports: ContainerReport) -> list[tuple[str, bool, str, str]]:
    chosen = job(tmp_path, "pyxis", launcher="slurm")
    named = [replace(report, host=f"n{node}") for node, report in enumerate(reports)]
    found = list(find_container_problems(named, [chosen]))
    assert all(each.what == "container" and each.advice for each in found)
    return [(each.host, each.wrong, each.message, each.advice) for each in found]


def with_folder(name: str, **changes: Any) -> ContainerReport:
    return replace(FINE, folders={**FINE.folders, name: replace(FOLDER, **changes)})


def test_what_is_well_is_not_said(tmp_path: Path) -> None:
    assert said(tmp_path, FINE, FINE, FINE) == []


@pytest.mark.parametrize(
    ("report", "wrong", "words"),
    [
        (replace(FINE, error="it ended with 1"), True, "was not looked at: it ended with 1"),
        (
            replace(FINE, version=None, runtime_error="enroot is not installed"),
            True,
            "enroot is not installed",
        ),
        (replace(FINE, version="3.4.0"), False, "pyxis 3.4.0; 3.5.0 on 2 of 3 hosts"),
        (
            replace(FINE, lacks=("/etc/subuid", "newuidmap")),
            True,
            "has no /etc/subuid, newuidmap for you",
        ),
        (
            replace(FINE, image_error="No such file or directory"),
            True,
            "image /images/app.sqsh: No such file",
        ),
        (replace(FINE, id="17"), True, "is another (17 bytes) than that of most"),
        (with_folder("ENROOT_DATA_PATH", unwritable="Permission denied"), True, "cannot write"),
        (with_folder("ENROOT_CACHE_PATH", unlockable="No locks"), True, "cannot be locked"),
        (with_folder("ENROOT_RUNTIME_PATH", shared=True, kind="nfs4"), True, "(nfs4) is shared"),
        (with_folder("ENROOT_TEMP_PATH", shared=True), False, "unpacked for a moment"),
        (with_folder("ENROOT_DATA_PATH", noexec=True), True, "mounted noexec"),
        (
            with_folder("ENROOT_DATA_PATH", free=30 * GIB),
            True,
            "30.0 GiB are free, and the image needs 60.0",
        ),
        (
            replace(FINE, seconds=(), start_error="[ERROR] no"),
            True,
            "does not start: [ERROR] no",
        ),
        (replace(FINE, seconds=(600.0, 1.0)), False, "takes 600 s to start; runs wait 900 s"),
        (replace(FINE, seconds=(20.0, 1.0)), False, "20.0 s to start; most hosts take 4.0 s"),
    ],
)
def test_one_problem_is_one_row_with_its_way_out(
    tmp_path: Path, report: ContainerReport, wrong: bool, words: str
) -> None:
    found = said(tmp_path, FINE, report, FINE)
    assert found and {host for host, *_ in found} == {"n1"}
    assert any(each[1] is wrong and words in each[2] for each in found), found


def test_an_image_that_is_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    path = tmp_path / "jobs.toml"
    chosen = job(tmp_path, "pyxis", launcher="slurm")
    path.write_text(path.read_text().replace("mounts =", 'dockerfile = "Dockerfile"\nmounts ='))
    from trainkit.jobs.load import load

    chosen = load(tmp_path).resolve("j").job
    report = replace(FINE, image_error="No such file or directory", size=None, id=None)
    (finding,) = find_container_problems([report], [chosen])
    assert finding.advice == "invoke build-container j"


def probe(tmp_path: Path, program: str, **values: object) -> dict[str, Any]:
    """What the program prints, with only `tmp_path/bin` and the system on PATH."""
    questions = RUNTIMES[program].questions
    request = {
        **asdict(questions),
        "folders": {name: each.default for name, each in questions.folders.items()},
        "image": "/no/such.sqsh",
        "is_file": True,
        "start": "",
        "seconds": 30,
        **values,
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    env = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ENROOT_SYSCONF_PATH": str(tmp_path),
        "ENROOT_CACHE_PATH": f"{tmp_path}/cache",
        "WHERE": "node",
    }
    argv = [sys.executable, "-I", "-S", str(PROBE), str(tmp_path / "request.json")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def stub(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_a_runtime_that_is_not_there(tmp_path: Path) -> None:
    said = probe(tmp_path, "enroot", start="/no/start.sh")
    assert said["runtime"]["error"] == "enroot is not installed" and "start" not in said
    assert said["image"]["error"] == "No such file or directory"


def test_folders_as_the_site_says(tmp_path: Path) -> None:
    """The environment, then a line of enroot.conf as a shell reads it, then enroot's default."""
    stub(tmp_path, "enroot", "echo 3.5.0")
    (tmp_path / "enroot.conf").write_text(
        f"#ENROOT_TEMP_PATH /no\nENROOT_RUNTIME_PATH {tmp_path}/run-$WHERE-$(id -u)\n"
        f"ENROOT_CACHE_PATH /not/this\n"
    )
    (tmp_path / "cache").mkdir()
    said = probe(tmp_path, "enroot")
    folders = {name: each["path"] for name, each in said["folders"].items()}
    assert folders == {
        "ENROOT_RUNTIME_PATH": f"{tmp_path}/run-node-{os.getuid()}",
        "ENROOT_CACHE_PATH": f"{tmp_path}/cache",
        "ENROOT_DATA_PATH": f"{tmp_path}/.local/share/enroot",
        "ENROOT_TEMP_PATH": "/tmp",
    }
    cache = said["folders"]["ENROOT_CACHE_PATH"]
    assert cache["exists"] and cache["free"] > 0 and cache["unlockable"] is None
    assert not said["folders"]["ENROOT_DATA_PATH"]["exists"]
    assert said["runtime"]["version"] == "3.5.0"


def test_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    stub(
        tmp_path,
        "docker",
        '[ "$1" = --version ] && { echo "Docker version 20.10.24, build 1"; exit; }\n'
        "echo 'Cannot connect to the Docker daemon' >&2; exit 1",
    )
    said = probe(tmp_path, "docker", image="app:1", is_file=False)
    assert said["runtime"]["version"] == "20.10.24"
    assert said["runtime"]["error"] == "Cannot connect to the Docker daemon"


def test_a_start_that_fails_and_one_that_hangs(tmp_path: Path) -> None:
    stub(tmp_path, "enroot", "echo 3.5.0")
    image = tmp_path / "a.sqsh"
    image.write_bytes(b"x")
    start = tmp_path / "node.sh"
    start.write_text("echo 'no space left' >&2; exit 8\n")
    given = {"image": str(image), "start": str(start)}
    assert probe(tmp_path, "enroot", **given)["start"] == {"error": "no space left", "seconds": []}
    start.write_text("sleep 900\n")
    hung = probe(tmp_path, "enroot", **given, seconds=0.5)["start"]
    assert hung == {"error": "no end within 0.5 s", "seconds": []}
    start.write_text("exit 0\n")
    done = probe(tmp_path, "enroot", **given)["start"]
    assert done["error"] is None and len(done["seconds"]) == 2


def test_file_systems_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        "2 1 0:1 / /scratch rw,noexec - lustre mds@tcp:/lfs rw",
        r"3 1 0:2 / /a\040b rw - nfs4 server:/x rw",
    ]
    monkeypatch.setattr(Path, "read_text", lambda self: "\n".join(lines))
    assert container_probe.file_system("/scratch/me") == (
        "lustre",
        "mds@tcp:/lfs",
        ["rw", "noexec"],
    )
    assert container_probe.file_system("/scratch2")[0] == "ext4"
    assert container_probe.file_system("/a b/c")[0] == "nfs4"


def test_on_this_machine(project: Project, tmp_path: Path) -> None:
    """doctor starts a container of the job's image twice, by the lines of a run."""
    image = entered_image(tmp_path / "image")
    path = project.path / "jobs.toml"
    text = path.read_text().replace(
        "[clusters.here]", f"[clusters.here]\nprolog = {image.prolog}", 1
    )
    text = text.replace("[jobs.text]\n", '[jobs.text]\ncontainer = "box"\n')
    path.write_text(f"{text}\n[containers.box]\n{image.table()}")
    document = project.document("doctor")
    (report,) = document["containers"]
    assert (report["runtime"], report["version"]) == ("enroot", "3.5.0")
    assert len(report["seconds"]) == 2 and report["size"] == image.file.stat().st_size
    image.file.write_bytes(image.file.read_bytes()[:100])
    project.invoke("doctor", exit=7)
    shown = project.invoke("doctor", exit=7).stdout
    assert re.search(r"wrong \S+ \(container\): containers.box does not start: .*truncated", shown)


def test_pyxis_by_a_step_of_the_same_job(tmp_path: Path) -> None:
    from trainkit.launch.cluster_care.container_checks import _write_request

    chosen = job(tmp_path, "pyxis", launcher="slurm")
    request, container = _write_request(chosen, tmp_path / "c", "doctor-1", 900.0)
    assert json.loads(request.read_text())["program"] == "enroot"
    last = (tmp_path / "c" / "node.sh").read_text().splitlines()[-1]
    options = " ".join(pyxis_options(container))
    assert last == (
        f"exec srun --overlap --nodes=1 --ntasks=1 --input=none --mpi=none --export=ALL {options}"
        f' --nodelist="$SLURMD_NODENAME" /bin/bash {tmp_path}/c/inside.sh'
    )
    assert "--container-name" not in last
