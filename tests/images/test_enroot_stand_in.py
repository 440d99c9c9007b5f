"""The stand-in for enroot does what others' tests rely on: an image file is entered as enroot
enters it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests import oci
from tests.images import enroot_stand_in

USR = ("--mount", "/usr:/usr:x-create=auto,rbind,ro")  # the image has folders only


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A .sqsh with an environment and a command script of its own."""
    if os.getuid() != 0 or any(shutil.which(name) is None for name in ("mksquashfs", "bwrap")):
        pytest.skip("needs squashfs-tools and bubblewrap, as root")
    root = tmp_path / "root"
    with tarfile.open(fileobj=io.BytesIO(oci.rootfs())) as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # from Python 3.11.4 on
        tar.extractall(root)
    (root / "etc/environment").write_text("OF_IMAGE=a b\nPATH=/opt/bin:/usr/bin:/bin\n")
    (root / "etc/rc").write_text('cd /var && exec "$@"\n')
    path = tmp_path / "app.sqsh"
    argv = ["mksquashfs", str(root), str(path), "-comp", "gzip", "-quiet", "-no-progress"]
    subprocess.run(argv, check=True, capture_output=True)
    return path


def enroot(folder: Path, *words: str, exit: int = 0, **more: str) -> str:
    """What it prints."""
    program = enroot_stand_in.install(folder / "bin") / "enroot"
    env = {**os.environ, "ENROOT_DATA_PATH": str(folder / "data"), **more}
    done = subprocess.run(
        [str(program), *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == exit, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_it_enters_an_image(tmp_path: Path, image: Path) -> None:
    (tmp_path / "mine.rc").write_text('cd /mnt && exec "$@"\n')
    mount = ("--mount", f"{tmp_path}:/mnt:x-create=auto,rbind")
    say = 'pwd; echo "$OF_IMAGE|$A|$B|$C"; touch /mnt/seen; touch /etc/no 2>&1; exit 7'
    words = [*USR, *mount, "--rc", str(tmp_path / "mine.rc"), "--env", "A=1", "--env", "B"]
    said = enroot(tmp_path, "start", *words, str(image), "/bin/sh", "-c", say, exit=7, B="2", C="3")
    assert said.splitlines()[:2] == ["/mnt", "a b|1|2|"]
    assert "Read-only file system" in said and (tmp_path / "seen").exists()
    assert enroot(tmp_path, "start", *USR, str(image), "pwd") == "/var\n", "the image's own script"
    words = ["start", "--rw", *USR, str(image), "/bin/sh", "-c", "touch /etc/no; ls /etc/no"]
    assert enroot(tmp_path, *words) == "/etc/no\n"


def test_a_login_shell_sets_the_path_anew(tmp_path: Path, image: Path) -> None:
    words = ("start", *USR, "app", "/bin/sh", "-c", "echo $PATH")
    enroot(tmp_path, "create", str(image))
    (tmp_path / "data/app/etc/profile").write_text("PATH=/usr/bin\n")
    assert enroot(tmp_path, *words) == "/usr/bin\n"
    assert enroot(tmp_path, *words, ENROOT_LOGIN_SHELL="no") == "/opt/bin:/usr/bin:/bin\n"
    assert enroot(tmp_path, "list") == "app\n"
    enroot(tmp_path, "remove", "-f", "app")
    assert enroot(tmp_path, "list") == ""


def test_it_refuses_as_enroot_does(tmp_path: Path, image: Path) -> None:
    assert "No such file or directory" in enroot(tmp_path, "start", "app", exit=1)
    assert "Invalid argument" in enroot(tmp_path, "start", "/no/app.sqsh", exit=1)
    with open(image, "r+b") as file:
        file.truncate(300)
    enroot(tmp_path, "start", *USR, str(image), "true", exit=1)
    image.write_bytes(b"no image")
    assert "Invalid image format" in enroot(tmp_path, "create", str(image), exit=1)
