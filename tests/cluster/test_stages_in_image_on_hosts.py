"""Stages in an image on hosts over ssh and as arrays of Slurm: really entered there, the same
bytes as outside, and nothing left by those who are killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.cluster.test_slurm_stages import arrays, quick
from tests.cluster.test_stages import hosts_of_units, made, write_corpus
from tests.conftest import wait_for
from tests.launch.containers.entered_image import MARK, EnteredImage, entered_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def image(tmp_path: Path) -> EnteredImage:
    return entered_image(tmp_path / "image")


def put_in(project: ClusterProject, cluster: str, image: EnteredImage) -> None:
    """The job `text` of the project in the image, on this cluster."""
    project.edit_jobs("[jobs.text]\n", '[jobs.text]\ncontainer = "box"\n')
    project.edit_jobs(f"[clusters.{cluster}]\n", f"[clusters.{cluster}]\nprolog = {image.prolog}\n")
    prolog = [f"[ -e {MARK} ] && echo $HOSTNAME >> {project.path}/entered"]
    with open(project.path / "jobs.toml", "a") as file:
        file.write(f"\n[containers.box]\n{image.table(prolog=prolog)}")


def leave(project: ClusterProject) -> None:
    """The same without the image, on one machine."""
    project.edit_jobs('container = "box"\n', "")


def entered(project: ClusterProject) -> set[str]:
    """The nodes on which something was really in the image."""
    path = project.path / "entered"
    return set(path.read_text().split()) if path.exists() else set()


def test_over_ssh(head: ClusterProject, cluster: Cluster, image: EnteredImage) -> None:
    write_corpus(head, 4, 3000)
    put_in(head, "pair", image)
    process = head.start("prep-data", "--job", "text")
    seen: set[str] = set()
    while process.poll() is None:
        units = [p for p in cluster.processes() if p.argv[-1:] and "spec.json" in p.argv[-1]]
        seen |= {p.host for p in units}
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert seen >= {"node1", "node2"} and entered(head) == {"node1", "node2"}
    assert not list((head.path / "sessions").iterdir())
    inside = made(head)
    leave(head)
    head.edit_jobs('cluster = "pair"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    head.invoke("prep-data", "--job", "text", "--force")
    assert made(head) == inside and len(inside) >= 3


def test_doctor_over_ssh(head: ClusterProject, image: EnteredImage) -> None:
    write_corpus(head, 1, 5)
    put_in(head, "pair", image)
    reports = head.document("doctor", "--cluster", "pair")["containers"]
    assert [report["host"] for report in reports] == ["node1", "node2"]
    assert all(len(report["seconds"]) == 2 for report in reports), reports
    assert entered(head) == set(), "only `true` is run there"


def test_who_asked_is_killed(head: ClusterProject, cluster: Cluster, image: EnteredImage) -> None:
    write_corpus(head, 4, 20000)
    put_in(head, "pair", image)
    process = head.start("prep-data", "--job", "text")
    wait_for(
        lambda: process.poll() is not None or hosts_of_units(cluster) >= {"node1", "node2"},
        "units on both",
    )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not cluster.strangers(), "nothing to be left")


def test_as_arrays_of_slurm(slurm: SlurmProject, image: EnteredImage) -> None:
    arrays(slurm, 3, 60)
    put_in(slurm, "queue", image)
    dry = slurm.invoke("prep-data", "--job", "text", "--dry-run").stdout
    assert "node.sh:" in dry and "inside.sh:" in dry and "enroot start" in dry
    slurm.invoke("prep-data", "--job", "text")
    scripts = slurm.path / "stamps" / "prep-data" / "lines--bpe.units"
    assert (scripts / "prep-data-lines--bpe-1" / "inside.sh").is_file()
    inside = made(slurm)
    assert entered(slurm) and entered(slurm) <= {"node1", "node2", "node3"}
    leave(slurm)
    slurm.edit_jobs('cluster = "queue"\nmodel = "text"', 'cluster = "here"\nmodel = "text"')
    slurm.invoke("prep-data", "--job", "text", "--force")
    assert made(slurm) == inside and len(inside) >= 3


def test_doctor_by_srun(slurm: SlurmProject, image: EnteredImage) -> None:
    arrays(slurm, 1, 5)
    put_in(slurm, "queue", image)
    reports = slurm.document("doctor", "--cluster", "queue")["containers"]
    assert [report["host"] for report in reports] == ["node1", "node2", "node3"]
    assert all(len(report["seconds"]) == 2 for report in reports), reports


def test_a_run_and_all_of_its_stages(slurm: SlurmProject, image: EnteredImage) -> None:
    """Arrays, the stage that the small job makes, and ranks: each in the image."""
    arrays(slurm, 2, 60)
    quick(slurm)
    put_in(slurm, "queue", image)
    slurm.edit_jobs("[jobs.quick]\n", '[jobs.quick]\ncontainer = "box"\n')
    said = slurm.invoke("train", "quick", "--detach").stdout
    assert "makes index" in said
    (run,) = slurm.runs()
    slurm.wait_state(run, "succeeded")
    assert entered(slurm)
    (output,) = (run / "launch" / "stages").glob("quick-ready-*.out")
    assert "index" in output.read_text()


def test_arrays_that_are_interrupted(slurm: SlurmProject, image: EnteredImage) -> None:
    """Slurm ends tasks, and with them what is in their containers."""
    arrays(slurm, 4, 20000)
    put_in(slurm, "queue", image)

    def units() -> list[str]:
        found = [p.argv[-1] for p in slurm.cluster.processes() if p.argv]
        return [word for word in found if word.endswith(".spec.json")]

    process = slurm.start("prep-data", "--job", "text")
    wait_for(lambda: process.poll() is not None or units(), "a unit")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, out + err
    slurm.wait_over()
    assert not units()
