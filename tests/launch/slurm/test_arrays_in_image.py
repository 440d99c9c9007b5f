"""Arrays whose tasks are in a container, as text; and the end of one whose client is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.containers.container_jobs import IMAGES, job
from trainkit.jobs.clusters import StagePlace
from trainkit.launch.array_units import ArrayLevel, split_units
from trainkit.launch.containers.stages import stage_box
from trainkit.launch.slurm.array_scripts import (
    ArrayPlace,
    array_script,
    container_scripts,
    level_container,
)
from trainkit.launch.slurm.arrays import job_words
from trainkit.stages.contract import Need, Unit

ARGV = (sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker")
UNITS = (Unit("tokens-0", ARGV, {}), Unit("tokens-1", ARGV, {}))
TEXT = Path("/corpus/a.jsonl")
NEED = Need("prep-data", "pile--bpe", "lock", 1, {}, (TEXT,), (), UNITS)
FOLDER = Path("/shared/stamps/prep-data/pile--bpe.units")
NAME = "prep-data-pile--bpe-0"
BOX = f"{FOLDER}/{NAME}"
MOUNTED = (
    "--mount=type=bind,source=/shared,target=/shared",
    "--mount=type=bind,source=/corpus,target=/corpus",
    "--mount=type=bind,source=/data,target=/data,readonly",
    "--mount=type=bind,source=/opt/topo,target=/topo",
)


def texts(tmp_path: Path, runtime: str) -> tuple[list[str], dict[str, list[str]]]:
    """(lines of the batch script, lines of what its tasks run)."""
    chosen = job(tmp_path, runtime, launcher="slurm", more="stages_in_container = true")
    asked = StagePlace(nodes=2)
    box = stage_box(chosen, "prep-data")
    place = ArrayPlace(chosen.cluster, asked, Path("/shared"), box=box)
    level = ArrayLevel(NAME, (UNITS[:1], UNITS[1:]), 1)
    container = level_container(place, NEED, level, FOLDER)
    assert container is not None
    code = Path("/shared/code/SHA")
    scripts = container_scripts(place, container, level, FOLDER, code)
    text = array_script(place, level, FOLDER, code, container)
    return text.splitlines(), {name: each.splitlines() for name, each in scripts.items()}


SRUN = "exec srun --kill-on-bad-exit=0 --wait=0 --mpi=none"


@pytest.mark.parametrize("runtime", ["docker", "podman", "apptainer", "enroot"])
def test_a_task_leads_into_the_container(tmp_path: Path, runtime: str) -> None:
    batch, scripts = texts(tmp_path, runtime)
    assert batch[-1] == f"{SRUN} /bin/bash -l {BOX}/node.sh" and f"module load {runtime}" in batch
    node, inside = scripts["node.sh"], scripts["inside.sh"]
    assert node[3:6] == [
        f"module load {runtime}",
        'set -- "$SLURM_JOB_ID-$SLURM_PROCID"',
        "export TRAINKIT_CLIENT_PID=$$",
    ]
    assert node[-1].startswith(f"exec {runtime} ") and f"{IMAGES[runtime]} " in node[-1]
    assert node[-1].endswith(f'{BOX}/inside.sh "$1"')
    assert inside[-1].startswith("exec python3 -I -c ") and inside[-1].endswith(
        f' /shared/code/SHA trainkit.stages.array_task {FOLDER}/{NAME}.json "$1"'
    )


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    """Refused before it reads what it cannot, and the job's own words are told."""
    inside = texts(tmp_path, "enroot")[1]["inside.sh"]
    check = inside[-2].replace("python3 -I -c", f"{sys.executable} -I -c")
    done = subprocess.run(["bash", "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    old = check.replace("(3, 11)", "(3, 99)")
    done = subprocess.run(["bash", "-c", old], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert "the Python of /images/app.sqsh is older than 3.11" in done.stderr
    assert done.stderr.rstrip().endswith("(containers.box.python)")
    out = f"{done.stderr}srun: error: node1: task 0: Exited with exit code 7\n\n"
    (tmp_path / f"{NAME}-7_0.out").write_text("")
    (tmp_path / f"{NAME}-7_1.out").write_text(out)
    assert job_words(tmp_path, ["7", "8"]) == (f"; {NAME}-7_1.out ends with: {done.stderr.strip()}")
    assert job_words(tmp_path, ["9"]) == ""


def test_what_a_task_knows_of_slurm(tmp_path: Path) -> None:
    """Which share is its, and of whose client it is."""
    names = [f"SLURM_{word}" for word in ("ARRAY_TASK_ID", "JOB_ID", "PROCID", "RESTART_COUNT")]
    names.append("TRAINKIT_CLIENT_PID")
    docker = texts(tmp_path, "docker")[1]["node.sh"][-1]
    assert " ".join(f"--env={name}" for name in names) in docker
    assert " ".join(MOUNTED) in docker
    assert f'--name=trainkit-{NAME}-0-"$1"' in docker and f"--label=trainkit.run={NAME}" in docker
    enroot = texts(tmp_path, "enroot")[1]["node.sh"][-1]
    assert " ".join(f"${{{name}+--env {name}}}" for name in names) in enroot
    apptainer = texts(tmp_path, "apptainer")[1]["node.sh"]
    assert any(
        line.startswith(f"for name in USER LOGNAME CUDA_VISIBLE_DEVICES {' '.join(names)};")
        for line in apptainer
    )


def test_pyxis_by_the_options_of_srun(tmp_path: Path) -> None:
    """No name, by which nodes would keep a container a level; its node looks at the mounts."""
    batch, scripts = texts(tmp_path, "pyxis")
    options = (
        "--export=HOME,USER,LOGNAME,SHELL,PATH,LANG,LC_ALL,TZ,A,B,C",
        "--container-image=/images/app.sqsh",
        "--container-mounts=/shared:/shared,/corpus:/corpus,/data:/data:ro,/opt/topo:/topo",
        "--container-env=A,B,C",
        "--container-workdir=/shared",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    )
    assert batch[-1] == f"{SRUN} {' '.join(options)} /bin/bash {BOX}/inside.sh"
    assert any("does not have what containers.box mounts" in line for line in batch)
    assert "export B='two words'" in batch
    assert list(scripts) == ["inside.sh"]


def test_units_of_this_python_stay_here() -> None:
    here = Unit("text-0", ARGV, {}, here=True)
    assert split_units([here, *UNITS], in_image=True) == ([here], list(UNITS))
    assert split_units([here, *UNITS], in_image=False) == ([], [here, *UNITS])


WATCHES = """
import os, signal, sys, time
from trainkit.stages.array_task import end_with_client
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
end_with_client(int(sys.argv[1]))
print("begins", flush=True)
time.sleep(900)
"""


def test_a_task_ends_with_its_client() -> None:
    """docker's is killed alone: what it started is another's child."""
    client = subprocess.Popen(["sleep", "900"])
    argv = [sys.executable, "-c", WATCHES, str(client.pid)]
    task = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None and task.stdout.readline() == "begins\n"
    client.kill()
    client.wait()
    assert task.wait(timeout=900) == 128 + signal.SIGTERM
    gone = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert gone.returncode == 8 and "is not to be seen in it" in gone.stderr
