"""`invoke build-container` with a real buildah and mksquashfs, on small images."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project, wait_for
from tests.images.lab import TINY, Lab
from tests.images.tiny import ImageProject, make_image_project
from trainkit.base.errors import TrainkitError
from trainkit.jobs.load import load
from trainkit.stages.build_container import image_plan
from trainkit.stages.import_container import work


@pytest.fixture
def box(project: Project, lab: Lab, request: pytest.FixtureRequest) -> Iterator[ImageProject]:
    """A project whose image has a tag of its own."""
    tag = f"localhost/{project.path.name.lower().replace('_', '-')}:1"
    yield make_image_project(project, lab, tag)
    subprocess.run(
        ["buildah", "rmi", "--force", tag],
        env={**os.environ, **lab.tiny},
        capture_output=True,
        check=False,
    )


def digest(box: ImageProject) -> str:
    return str(box.record()["digest"])


def test_built_once_fresh_then_stale_by_a_file(box: ImageProject) -> None:
    said = box.build().stdout
    assert "box" in said
    assert any(" bud " in call for call in box.calls()), "buildah has built"
    first = digest(box)
    assert first.startswith("sha256:") and first == box.record()["digest"]
    assert (
        box.lab.call(
            "enroot", "start", "--mount", "/usr:/usr:rbind,ro", str(box.image), "cat", "/srv/made"
        )
        == "made\n"
    )

    value = box.document("build-container", "random")
    assert [stage["fresh"] for stage in value["stages"]] == [True]
    assert value["image"] == box.record(), "the record is that of the file"
    assert box.calls() == [], "nothing is built or imported where all is fresh"

    (box.path / "files" / "a.txt").write_text("b\n")
    said = box.build("--dry-run").stdout
    assert "files/a.txt changed" in said and box.calls() == []
    said = box.build("--dry-run", "--set", "container.tag=localhost/other:1").stdout
    assert "-t localhost/other:1 " in said, "as the job is with the override"
    said = box.build().stdout
    assert "files/a.txt" in said and digest(box) != first
    (box.path / "files" / "a.txt").write_text("a\n")
    box.build()
    assert digest(box) == first, "the same input is the same image"


def test_two_builds_at_once(box: ImageProject) -> None:
    box.step("sleep 1; echo made > /srv/made")
    both = [box.start("build-container", "random") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err
    assert len([call for call in box.calls() if " bud " in call]) == 1, "the second found it made"
    assert [path.name for path in box.image.parent.glob("*.sqsh*")].count("box.sqsh") == 1


def test_truncated_or_of_another_image(box: ImageProject) -> None:
    box.build()
    first, size = digest(box), box.image.stat().st_size
    with open(box.image, "r+b") as file:
        file.truncate(size - 4096)
    said = box.build("--dry-run").stdout
    assert "box.sqsh" in said and "stale" in said
    said = box.invoke("train", "random", "--dry-run").stdout
    box.calls()
    box.build()
    assert box.image.stat().st_size == size and digest(box) == first
    other = box.path / "other"
    other.mkdir()
    (other / "file").write_text("another image\n")
    subprocess.run(
        ["mksquashfs", str(other), str(box.image), "-noappend", "-quiet", "-no-progress"],
        check=True,
        capture_output=True,
    )
    said = box.build("--dry-run").stdout
    assert "box.sqsh" in said and "stale" in said
    box.build()
    assert box.image.stat().st_size == size


def test_a_tag_that_became_another_image(
    box: ImageProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the build and the import: somebody else builds with the same tag."""
    box.build()
    tag = box.record()["tag"]
    for name, value in box.lab.tiny.items():
        monkeypatch.setenv(name, value)
    plan = image_plan(load(box.path).resolve("random").job)
    assert plan is not None
    box.image.unlink()
    other = box.lab.call("buildah", "from", "--pull-never", TINY).strip()
    box.lab.call("buildah", "commit", "--quiet", "--rm", other, tag)
    with pytest.raises(TrainkitError, match=f"{tag} is [0-9a-f]+ in buildah's store now"):
        work({"plan": plan.to_json(), "unit": "import"}, lambda done, of: None)
    assert not box.image.exists(), "no file of another image has the record of this one"
    box.build()
    assert box.record()["digest"] != ""


LONG = f"8{os.getpid():07d}"  # seconds, by which the step is known among other suites' too


def test_killed_in_the_middle(box: ImageProject) -> None:
    box.step(f"touch {box.path}/never-seen; sleep 1000")
    box.step(f"echo $$ > /srv/pid; sleep {LONG}")
    process = box.start("build-container", "random")
    wait_for(lambda: any(" bud " in line for line in _lines(box.path / "calls")), "the build")
    sleeping = wait_for(_sleepers, "the build's step")
    left = wait_for(lambda: _containers_of(box, process.pid), "working containers")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert sleeping and not box.image.exists()
    mine = box.lab.call("buildah", "from", "--pull-never", "scratch").strip()
    box.step("echo made > /srv/made")
    box.build()
    assert box.image.exists() and digest(box)
    try:
        assert not _sleepers(), "the next build ends what is left of the dead one"
        now = {path.parent.parent.name for path in _notes(box)}
        assert not now & left, "and removes its containers"
        assert mine in box.lab.call("buildah", "containers"), "and no others"
    finally:
        box.lab.call("buildah", "rm", mine)


def test_a_step_that_fails(box: ImageProject) -> None:
    # buildah passes a step's words on by a pipe, and loses the last if the step ends at once
    box.step("echo 'Permission denied: /x' >&2; sleep 1; exit 7")
    done = box.build(exit=6)
    said = done.stdout + done.stderr
    assert "exit status 7" in said and "Permission denied: /x" in said
    assert "registry" not in said, "these are the step's words, not a registry's"
    log = next((box.path / "stamps").rglob("build.log")).read_text()
    left = [path for path in _notes(box) if path.parent.parent.name[:12] in log]
    assert "working container" in log and not left


def _notes(box: ImageProject) -> list[Path]:
    """What buildah notes of each working container."""
    return list(box.lab.folder.glob("store/*-containers/*/userdata/buildah.json"))


def _containers_of(box: ImageProject, pid: int) -> set[str]:
    """Ids of working containers whose mark names a child of this process."""
    found = set()
    for path in _notes(box):
        try:
            mark = (json.loads(path.read_text())["Args"] or {}).get("TRAINKIT_BUILD", "")
            status = Path("/proc", mark.split(":")[1], "stat").read_text()
        except (OSError, ValueError, IndexError, KeyError):
            continue  # another test's
        if int(status.rpartition(")")[2].split()[1]) == pid:
            found.add(path.parent.parent.name)
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _sleepers() -> list[int]:
    """Processes of the build's step, by their file."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", LONG.encode()]:
                found.append(int(entry.name))
    return found


def test_a_full_disk(box: ImageProject, tmp_path: Path) -> None:
    box.step("head -c 8000000 /dev/urandom > /srv/large")
    images = box.path / "images"
    images.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(images)], check=True)
    try:
        done = box.build(exit=6)
        said = done.stdout + done.stderr
        assert "disk is full" in said or "No space left" in said
        assert not box.image.exists(), "nothing half-made has its name"
    finally:
        subprocess.run(["umount", "--lazy", str(images)], check=True)
    shutil.rmtree(images)
    assert json.loads(box.build("--dry-run", "--json").stdout)["stages"][0]["fresh"] is False
    box.build()
    assert box.image.stat().st_size > 8_000_000
