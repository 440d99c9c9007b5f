"""Stages of a job in its image: what is made is the same, nothing outlives whoever asked for it,
and what is wrong with the image is said."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import oci
from tests.conftest import Project, alive, wait_for
from tests.launch.containers.entered_image import MARK, EnteredImage, entered_image
from tests.oci import Oci
from trainkit.base.process_marks import find_descendants, find_marked
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.containers.stages import read_places, stage_box
from trainkit.launch.remote_units import this_machine_in_image
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.stamps import Freshness, unit_folder

SLEEPS = """
import json, os, sys, time
spec = json.load(open(sys.argv[1]))
inside = os.path.exists(spec["mark"])
with open(spec["pid"], "w") as file:
    json.dump([os.getpid(), os.getppid(), inside, sys.executable], file)
exec(spec["do"])
print(json.dumps({"result": {}}), flush=True)
"""


class Quiet:
    """A reporter that says nothing."""

    def verdict(self, verdict: Freshness) -> None: ...
    def waiting(self, need: Need, holder: str) -> None: ...
    def started(self, need: Need, units: Sequence[Unit]) -> None: ...
    def counted(self, unit: Unit, counts: Mapping[str, int]) -> None: ...
    def progress(self, unit: Unit, fraction: float) -> None: ...
    def finished(self, need: Need) -> None: ...


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> EnteredImage:
    return entered_image(tmp_path_factory.mktemp("image"))


def put_in(project: Project, box: EnteredImage | Oci, **more: object) -> Project:
    """The project's job on text, in the image."""
    path = project.path / "jobs.toml"
    text = path.read_text()
    text = text.replace("[clusters.here]", f"[clusters.here]\nprolog = {box.prolog}")
    text = text.replace("[jobs.text]\n", '[jobs.text]\ncontainer = "box"\n')
    plain = '[jobs.plain]\nextends = "text"\ncontainer = "none"\n'
    path.write_text(f"{text}\n{plain}\n[containers.box]\n{box.table(**more)}")
    return project


@pytest.fixture
def boxed(project: Project, image: EnteredImage) -> Project:
    return put_in(project, image)


def sums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".bin", ".idx") or path.name == "tokenizer.json"
    }


def test_the_same_bytes_and_as_fresh_outside(boxed: Project, image: EnteredImage) -> None:
    """Made inside, it is fresh outside, and the other way round."""
    boxed.invoke("prep-data", "--job", "text")
    inside = sums(boxed.path / "data")
    assert len(inside) == 3
    again = boxed.invoke("prep-data", "--job", "plain")
    assert "is fresh" in again.stdout and "stale" not in again.stdout
    shutil.rmtree(boxed.path / "data")
    shutil.rmtree(boxed.path / "stamps")
    boxed.invoke("prep-data", "--job", "plain")
    assert sums(boxed.path / "data") == inside
    assert "stale" not in boxed.invoke("prep-data", "--job", "text").stdout
    assert not list((boxed.path / "sessions").iterdir())


def a_need(folder: Path, job: Job, do: str) -> tuple[Need, Path, Callable[[], None]]:
    """A stage of one unit in the job's image, the file where it says who it is, and what runs
    it."""
    place = this_machine_in_image(job, "prep-data", lambda text: None)
    assert place is not None
    said = folder / "who"
    unit = Unit(
        "sleeper",
        (sys.executable, "-I", "-c", SLEEPS),
        {"pid": str(said), "do": do, "mark": MARK},
    )
    need = Need("prep-data", "thing", "thing", 1, {}, (), (), (unit,))
    unit_folder(folder, "thing").mkdir(parents=True, exist_ok=True)
    work = StageWork(need, need.units, folder, Quiet())
    return need, said, lambda: place.run(work)


def in_the_background(run: Callable[[], None]) -> int:
    """The pid of a process that does it, and ends with 1 where that fails."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return child


def test_nothing_is_left_after_a_kill(boxed: Project, tmp_path: Path) -> None:
    """The units' session ends with the process that has begun it, however that ends."""
    job = load(boxed.path).resolve("text").job
    _, said, run = a_need(tmp_path, job, "time.sleep(900)")
    child = in_the_background(run)
    pid, agent, inside, _ = json.loads(
        wait_for(lambda: said.exists() and said.read_text(), "the unit to begin")
    )
    assert inside and alive(pid) and alive(agent)
    (session,) = (tmp_path / "sessions").iterdir()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: not alive(pid) and not alive(agent), "unit and agent to end")
    wait_for(lambda: not find_marked(session.name), "all of the session to end")


def test_the_unit_runs_with_the_images_python(boxed: Project, tmp_path: Path) -> None:
    path = boxed.path / "jobs.toml"
    path.write_text(path.read_text().replace(f'python = "{sys.executable}"', 'python = "chosen"'))
    chosen = tmp_path / "bin"
    chosen.mkdir()
    (chosen / "chosen").symlink_to(sys.executable)
    path.write_text(f'{path.read_text()}\nprolog = ["export PATH={chosen}:$PATH"]\n')
    job = load(boxed.path).resolve("text").job
    _, said, run = a_need(tmp_path, job, "pass")
    run()
    _, _, inside, python = json.loads(said.read_text())
    assert inside and python == str(chosen / "chosen")


def test_a_python_that_is_not_in_the_image(project: Project, image: EnteredImage) -> None:
    failed = put_in(project, image, python="/no/python3").invoke(
        "prep-data", "--job", "text", exit=8
    )
    assert "the image has no /no/python3 (containers.box.python)" in failed.stderr


def test_a_python_that_is_too_old(project: Project, image: EnteredImage, old_python: str) -> None:
    ask = "import os, sys; print(sys.base_prefix, os.path.dirname(sys.executable))"
    told = subprocess.run([old_python, "-c", ask], capture_output=True, text=True, check=True)
    table: dict[str, Any] = {"python": old_python, "mounts": ["/usr:/usr:ro"]}
    table["mounts"] += [f"{place}:{place}:ro" for place in dict.fromkeys(told.stdout.split())]
    failed = put_in(project, image, **table).invoke("prep-data", "--job", "text", exit=7)
    assert "trainkit's own code needs 3.11 or newer: containers.box.python" in failed.stderr


def test_a_mount_that_is_not_there(project: Project, image: EnteredImage) -> None:
    failed = put_in(project, image, mounts=["/no/such:/x"]).invoke(
        "prep-data", "--job", "text", exit=8
    )
    assert "what containers.box mounts: /no/such" in failed.stderr


def test_an_image_that_was_cut_off(project: Project, image: EnteredImage, tmp_path: Path) -> None:
    cut = tmp_path / "cut.sqsh"
    cut.write_bytes(image.file.read_bytes()[:64])
    failed = put_in(project, image, image=str(cut)).invoke("prep-data", "--job", "text", exit=8)
    assert "without an agent in its container" in failed.stderr and "cut.sqsh" in failed.stderr
    assert not list((project.path / "data").rglob("*.bin"))


def test_units_of_this_python_and_downloads_stay_outside(
    boxed: Project, image: EnteredImage, tmp_path: Path
) -> None:
    job = load(boxed.path).resolve("text").job
    assert stage_box(job, "build") is None and stage_box(job, "engine-source") is None
    assert stage_box(job, "weights") is not None
    assert this_machine_in_image(job, "weights", print) is None, "a download"
    need, said, run = a_need(tmp_path, job, "pass")
    (unit,) = need.units
    object.__setattr__(unit, "here", True)
    run()
    assert json.loads(said.read_text())[2] is False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_in_podman_and_nothing_is_left(project: Project, tmp_path: Path) -> None:
    """A container of another's making: killed with who asked, and when its client is killed."""
    with oci.podman(tmp_path / "oci") as podman:
        put_in(project, podman, stages_in_container=True)
        project.invoke("prep-data", "--job", "text")
        assert len(sums(project.path / "data")) == 3
        job = load(project.path).resolve("text").job
        for victim in ("who asked", "its client"):
            killed_in_podman(podman, project.path / victim.replace(" ", "-"), job, victim)


def killed_in_podman(podman: Oci, folder: Path, job: Job, victim: str) -> None:
    """Kill one while a unit runs; `folder`: below the root, which is mounted."""
    folder.mkdir()
    _, said, run = a_need(folder, job, "time.sleep(900)")
    child = in_the_background(run)
    pid, agent, *_ = json.loads(
        wait_for(lambda: said.exists() and said.read_text(), "the unit to begin")
    )
    (session,) = (folder.parent / "sessions").iterdir()
    assert podman.containers(session.name)
    if victim == "its client":
        clients = [each for each in find_descendants(child) if each.argv0.endswith("podman")]
        os.kill(clients[0].pid, signal.SIGKILL)
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status, "it does not count as made"
    wait_for(lambda: not alive(pid) and not alive(agent), "unit and agent to end")
    label = f"--filter=label=trainkit.run={session.name}"
    wait_for(lambda: not podman.call("ps", "--quiet", label), "the container to end")
    podman.call("rm", "--all", "--force")  # of a client that is killed podman removes it late
    shutil.rmtree(session, ignore_errors=True)


def test_what_is_mounted_to_read_files(tmp_path: Path) -> None:
    """Their folders and where links lead; files alone where the image has such a folder."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "a.txt").write_text("")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.txt").symlink_to(real / "a.txt")
    paths = [tmp_path / "links" / "a.txt", Path("/usr/share/dict/words"), Path("/top.txt")]
    assert read_places(paths) == [
        str(tmp_path / "links"),
        str(real),
        "/usr/share/dict/words",
        "/top.txt",
    ]
