"""What a node does with an image file before anything starts of it: the lines are really run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.images.made_files import pretend_squashfs, real_squashfs
from tests.launch.containers.container_jobs import box
from tests.programs import put_program
from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.contract import ImageRecord, record_path, write_record
from trainkit.images.squashfs import fingerprint
from trainkit.jobs.containers import Container
from trainkit.launch.containers.image_files import (
    ImageFile,
    image_file,
    image_lines,
    refuse_bad_file,
)
from trainkit.launch.containers.pyxis import pyxis_options, step_scripts


def container(image: Path, stage_to: Path | None = None) -> Container:
    return Container(
        name="box",
        image=str(image),
        runtime="enroot",
        stage_to=None if stage_to is None else str(stage_to),
    )


def known(image: Path, stage_to: Path | None = None) -> ImageFile:
    found = image_file(container(image, stage_to))
    assert found is not None
    return found


def script(image: ImageFile, last: str = "echo started of $copy") -> str:
    return "\n".join(["set -e", *image_lines(image), last]) + "\n"


def node(
    image: ImageFile, last: str = "echo started of $copy", path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What a node says; `path`: programs that are found before others."""
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    argv = ["bash", "-c", script(image, last)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def recorded(image: Path) -> Path:
    size = image.stat().st_size
    record = ImageRecord("box", "t", "sha256:1", size=size, fingerprint=fingerprint(image))
    write_record(record_path(image), record)
    return image


def test_a_shared_file_that_is_not(tmp_path: Path) -> None:
    """Each has its own words, and exit 8: nothing has started."""
    path = real_squashfs(tmp_path / "box.sqsh")
    image = known(path)
    size = path.stat().st_size
    os.truncate(path, size - 8192)
    done = node(image)
    assert done.returncode == 8 and not done.stdout
    assert (
        f"{path} is truncated: it has {size - 8192} bytes, and its superblock says" in done.stderr
    )
    path.write_bytes(b"\0ELF" * 100)
    assert f"{path} is not a squashfs image (containers.box.image)" in node(image).stderr
    path.write_bytes(b"")
    assert "is not a squashfs image" in node(image).stderr
    path.unlink()
    done = node(image)
    assert done.returncode == 8 and f"there is no image {path}" in done.stderr


def test_a_shared_file_of_another_image_than_its_record(tmp_path: Path) -> None:
    whole = known(recorded(real_squashfs(tmp_path / "real.sqsh")))
    path = recorded(pretend_squashfs(tmp_path / "box.sqsh"))
    for image in (whole, known(path)):
        done = node(image, "echo on")
        assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr
        assert image.started == str(image.path)
    pretend_squashfs(path, seed=1)
    done = node(known(path), "echo on")
    assert done.returncode == 8 and not done.stdout
    assert "box.sqsh is another image than the one that box.sqsh.json records" in done.stderr
    assert "build-container" in done.stderr


def test_a_bad_file_is_refused_before_anything_is_submitted(project: Project) -> None:
    """Unless trainkit makes it anew, or only the nodes see it."""
    image = recorded(pretend_squashfs(project.path / "box.sqsh"))
    refuse_bad_file(container(image))
    pretend_squashfs(image, seed=2)
    with pytest.raises(TrainkitError, match=r"another image than box\.sqsh\.json") as caught:
        refuse_bad_file(container(image))
    assert caught.value.exit == Exit.START
    os.truncate(image, 1000)
    made = {"name": "box", "runtime": "enroot", "source": "docker://a", "image": str(image)}
    refuse_bad_file(Container.model_validate(made))
    refuse_bad_file(container(project.path / "none.sqsh"))
    path = project.path / "jobs.toml"
    table = f'[containers.box]\nimage = "{image}"\nruntime = "enroot"\n'
    boxed = '[jobs.boxed]\nextends = "random"\ncontainer = "box"\n'
    path.write_text(f"{path.read_text()}\n{table}{boxed}")
    said = project.invoke("train", "boxed", exit=8).stderr
    assert f"{image} is truncated: it has 1000 bytes" in said and "containers.box.image" in said
    assert not (project.path / "runs").exists()


def test_nodes_and_python_know_a_file_by_the_same_sum(tmp_path: Path) -> None:
    for size in (96, 4096, 5000, 65536, 65537, 300_000):
        path = pretend_squashfs(tmp_path / f"{size}.sqsh", size)
        done = node(known(path), f'[ "$(known {path})" = {fingerprint(path)} ] && echo same')
        assert done.stdout == "same\n", (size, done.stderr)


def test_a_copy_on_the_node(tmp_path: Path) -> None:
    """Under a name by which another image's copy is not taken for it; a second start copies
    nothing."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = known(pretend_squashfs(tmp_path / "images/box.sqsh"), disk)
    assert image.local is not None and image.fingerprint is not None
    assert image.started == f"{disk}/box-{image.fingerprint[:12]}.sqsh"
    done = node(image)
    assert done.stdout == f"started of {image.local}\n", done.stderr
    assert image.local.read_bytes() == image.path.read_bytes()
    before = image.local.stat().st_ino
    assert node(image).returncode == 0 and image.local.stat().st_ino == before
    os.truncate(image.local, 1000)
    assert node(image).returncode == 0
    assert image.local.read_bytes() == image.path.read_bytes(), "a damaged copy is made again"
    assert sorted(path.name for path in disk.iterdir()) == [".box.lock", image.local.name]


def test_two_at_once_copy_once(tmp_path: Path) -> None:
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = known(pretend_squashfs(tmp_path / "box.sqsh", 20_000_000), disk)
    programs = tmp_path / "bin"
    put_program(
        programs,
        "cp",
        f'#!/bin/bash\necho x >> {tmp_path}/copies\nexec {shutil.which("cp")} "$@"\n',
    )
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    argv = ["bash", "-c", script(image)]
    running = [
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    said = [child.communicate() for child in running]
    assert [child.returncode for child in running] == [0] * 4, said
    assert (tmp_path / "copies").read_text() == "x\n"
    assert len(list(disk.glob("*.sqsh"))) == 1 and not list(disk.glob(".*.part"))


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """The next start finds no copy that looks whole, takes away what is left, and makes it."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = known(pretend_squashfs(tmp_path / "box.sqsh"), disk)
    programs = tmp_path / "bin"
    put_program(programs, "cp", '#!/bin/bash\nhead -c 1000 "$2" > "$3"\nexec sleep 1000\n')
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    argv = ["bash", "-c", script(image)]
    child = subprocess.Popen(argv, env=env, start_new_session=True)
    while not (parts := list(disk.glob(".box@*.part"))) or not parts[0].stat().st_size:
        assert child.poll() is None
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert image.local is not None and not image.local.exists() and list(disk.glob(".*.part"))
    done = node(image)
    assert done.returncode == 0, done.stderr
    assert image.local.read_bytes() == image.path.read_bytes()
    assert not list(disk.glob(".*.part"))


def test_a_killed_start_whose_copy_goes_on(tmp_path: Path) -> None:
    """Its program still writes, and holds the lock: the next start waits, and makes its own."""
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = known(pretend_squashfs(tmp_path / "box.sqsh"), disk)
    programs = tmp_path / "bin"
    programs.mkdir()
    copier = programs / "cp"
    copier.write_text(
        f"#!/bin/bash\necho begin > {tmp_path}/begun\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05;"
        f' done\ncp -f "$2" "$3"\necho end > {tmp_path}/ended\n'
    )
    copier.write_text(copier.read_text().replace("\ncp ", f"\n{shutil.which('cp')} "))
    copier.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    child = subprocess.Popen(["bash", "-c", script(image)], env=env)
    while not (tmp_path / "begun").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    after = subprocess.Popen(
        ["bash", "-c", script(image, f"ls {tmp_path}/ended")], stdout=subprocess.PIPE, text=True
    )
    (tmp_path / "go").touch()
    assert after.communicate()[0] == f"{tmp_path}/ended\n" and after.returncode == 0
    assert image.local is not None and image.local.read_bytes() == image.path.read_bytes()
    assert not list(disk.glob(".*.part"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.getuid() != 0:
        pytest.skip("needs to mount a small disk, as root")
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_too_little_space_is_said_with_the_numbers(tmp_path: Path, small_disk: Path) -> None:
    image = known(pretend_squashfs(tmp_path / "box.sqsh", 3_000_000), small_disk)
    done = node(image)
    assert done.returncode == 8 and not done.stdout
    assert f"{small_disk} has 1 MB free, and {image.path} has 3 MB" in done.stderr
    assert "containers.box.stage_to" in done.stderr
    assert not list(small_disk.glob("*.sqsh"))


def test_a_disk_that_is_full_half_way(tmp_path: Path, small_disk: Path) -> None:
    """Others may have filled it since it was asked: nothing of the copy is left."""
    image = known(pretend_squashfs(tmp_path / "box.sqsh", 900_000), small_disk)
    programs = tmp_path / "bin"
    put_program(programs, "df", "#!/bin/sh\nprintf 'Avail\\n99999999\\n'\n")
    (small_disk / "others").write_bytes(b"x" * 500_000)
    done = node(image, path=programs)
    assert done.returncode == 8 and "No space left on device" in done.stderr
    assert sorted(path.name for path in small_disk.iterdir()) == [".box.lock", "others"]


def test_older_copies_go_when_nobody_uses_them(tmp_path: Path) -> None:
    disk = tmp_path / "nvme"
    disk.mkdir()
    names = ["0" * 12, "1" * 12, "2" * 12]
    copies = [pretend_squashfs(disk / f"box-{name}.sqsh") for name in names]
    others = [pretend_squashfs(disk / f"{name}.sqsh") for name in ("box-2-" + "3" * 12, "box", "x")]
    long_ago = time.time() - 7200
    for path in (*copies[:2], *others):
        os.utime(path, (long_ago, long_ago))
    image = known(pretend_squashfs(tmp_path / "box.sqsh"), disk)
    assert image.local is not None
    with open(copies[1]) as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        done = node(image)
    assert done.returncode == 0, done.stderr
    left = {path.name for path in disk.glob("*.sqsh")}
    # the second is in use, the third was asked for a moment ago
    assert left == {image.local.name, *(path.name for path in (*copies[1:], *others))}


def test_what_runs_of_a_copy_holds_it(tmp_path: Path) -> None:
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = known(pretend_squashfs(tmp_path / "box.sqsh"), disk)
    try_it = 'exec bash -c \'flock --nonblock "$0" echo free || echo held\' "$copy"'
    assert node(image, try_it).stdout == "held\n"


def test_folders_that_are_not_there_or_not_ours(tmp_path: Path) -> None:
    image = known(pretend_squashfs(tmp_path / "box.sqsh"), tmp_path / "none")
    done = node(image)
    assert done.returncode == 8
    assert f"there is no folder {tmp_path}/none (containers.box.stage_to)" in done.stderr
    if os.getuid() != 0:
        pytest.skip("another user's file needs root")
    (tmp_path / "none").mkdir()
    assert image.local is not None
    shutil.copy(image.path, image.local)
    os.chown(image.local, 12345, 12345)
    done = node(image)
    assert done.returncode == 8 and "is another user's: set containers.box.stage_to" in done.stderr
    os.chown(image.local, 0, 0)
    assert node(image).returncode == 0, "root's own may be everybody's"


def test_a_dry_run_shows_the_lines(project: Project) -> None:
    """Those of node.sh and the local path that the runtime gets; with pyxis those of its look."""
    image = pretend_squashfs(project.path / "box.sqsh")
    path = project.path / "jobs.toml"
    table = f'[containers.box]\nimage = "{image}"\nruntime = "enroot"\nstage_to = "/mnt/nvme"\n'
    boxed = '[jobs.boxed]\nextends = "random"\ncontainer = "box"\n'
    path.write_text(f"{path.read_text()}\n{table}{boxed}")
    shown = project.invoke("train", "boxed", "--dry-run").stdout
    local = f"/mnt/nvme/box-{fingerprint(image)[:12]}.sqsh"
    assert f"  copy={local}\n" in shown and f" {local} /bin/bash" in shown
    assert f"  image={image}\n" in shown and "  flock 8 ||" in shown


def test_the_look_of_pyxis_copies_too(tmp_path: Path) -> None:
    disk = tmp_path / "nvme"
    disk.mkdir()
    image = pretend_squashfs(tmp_path / "app.sqsh")
    more = f'stage_to = "{disk}"'
    given = box(tmp_path, "pyxis", launcher="slurm", image=str(image), more=more)
    assert given.file is not None
    local = given.file.local
    assert local is not None and f"--container-image={local}" in pyxis_options(given)
    given = replace(given, mounts=())
    look = step_scripts(given, [["look"], ["start"]], 90)["mounts.sh"]
    done = subprocess.run(["bash", "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert local.read_bytes() == image.read_bytes()


def test_an_image_that_is_not_made_yet(tmp_path: Path) -> None:
    """A dry run names what it can."""
    image = known(tmp_path / "images/box.sqsh", tmp_path)
    assert image.started == f"{tmp_path}/box-not-made-yet.sqsh"
    assert image_file(replace_runtime(container(tmp_path / "x.sqsh"))) is None


def replace_runtime(given: Container) -> Container:
    return Container(name=given.name, image="reg/app:1", runtime="docker")
