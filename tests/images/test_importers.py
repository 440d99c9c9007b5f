"""What makes image files: the exact words of each program, and a real import with buildah."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.images.made_files import real_squashfs
from tests.programs import put_program
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.worker import ProgressCallback
from trainkit.images.contract import ImagePlan
from trainkit.images.importers import importer_of
from trainkit.images.importers.enroot import import_argv
from trainkit.images.importers.mksquashfs import (
    ImageConfig,
    configure,
    creation_time,
    enroot_files,
    quoted,
)
from trainkit.images.importers.published import published
from trainkit.images.importers.squash_options import ENROOT_DEFAULT, squash_options
from trainkit.images.squashfs import squashfs_problem
from trainkit.jobs.containers import Container, Squashfs

FILE = Path("/shared/images/box.sqsh")
SIF = Path("/shared/images/box.sif")


def plan(builder: str, root: Path = Path("/shared"), **keys: object) -> ImagePlan:
    """Of a container named box."""
    given = {"name": "box", "runtime": "enroot", "image": str(root / "images/box.sqsh"), **keys}
    if "source" not in keys:
        given = {"dockerfile": "Dockerfile", "tag": "app:1", **given}
    return ImagePlan(Container.model_validate(given), root, builder)


def commands(given: ImagePlan) -> list[str]:
    importer = importer_of(given)
    assert importer is not None and given.image_file is not None
    return [" ".join(argv) for argv in importer.commands(given, given.image_file)]


def run_importer(given: ImagePlan, progress: ProgressCallback = lambda done, of: None) -> Path:
    """Make the image file; returns it."""
    importer, file = importer_of(given), given.image_file
    assert importer is not None and file is not None
    importer.run(given, file, progress)
    return file


def test_enroot_as_azure_and_aws_type_it() -> None:
    """Azure's 00-setup_environment.sh; AWS's document has -o, which is the same option
    (enroot.in)."""
    azure = (
        "enroot import --output $STAGE_PATH/pytorch+25.03+py3.sqsh"
        " docker://nvcr.io#nvidia/pytorch:25.03-py3"
    )
    given = plan("", source="docker://nvcr.io#nvidia/pytorch:25.03-py3", runtime="pyxis")
    source = given.container.source
    assert source is not None
    argv = import_argv(Path("$STAGE_PATH/pytorch+25.03+py3.sqsh"), source)
    assert argv == tuple(azure.split())
    tag = (
        "111122223333.dkr.ecr.us-east-1.amazonaws.com/"
        "bignlp-training:22.09-py3-bcp-nsys-2022.5.1-v2-efa"
    )
    file = "/apps/bignlp-training_22.09-py3-bcp-nsys-2022.5.1-v2-efa.sqsh"
    aws = f"enroot import -o {file} dockerd://{tag}"
    given = plan("docker", tag=tag, image=file, runtime="pyxis")
    assert commands(given) == [aws.replace(" -o ", " --output ")]


def test_enroot() -> None:
    assert commands(plan("podman")) == [f"enroot import --output {FILE} podman://app:1"]
    packed = plan("docker", squashfs={"compression": "zstd", "level": 3})
    assert commands(packed) == [
        "env ENROOT_SQUASH_OPTIONS=-comp zstd -Xcompression-level 3 -exit-on-error"
        f" enroot import --output {FILE} dockerd://app:1"
    ]


def test_how_files_are_packed() -> None:
    assert squash_options(None) == ENROOT_DEFAULT == ("-comp", "lzo", "-noD", "-exit-on-error")
    assert squash_options(Squashfs(compression="lz4")) == ("-comp", "lz4", "-exit-on-error")
    words = ("-comp", "gzip", "-Xcompression-level", "1", "-exit-on-error")
    assert squash_options(Squashfs(compression="gzip", level=1)) == words


def test_mksquashfs() -> None:
    given = plan("buildah", squashfs={"compression": "lz4"})
    first, mount, squash, unmount, last = commands(given)
    assert first.startswith("buildah from --pull-never --name trainkit-import-")
    name = first.split()[4]
    assert first.endswith(f"{name} app:1") and mount == f"buildah mount {name}"
    assert squash == (
        f"mksquashfs ROOTFS {FILE} -all-root -noappend -no-progress -mkfs-time CREATED"
        " -comp lz4 -exit-on-error -wildcards -e dev/* .dockerenv"
    )
    assert (unmount, last) == (f"buildah umount {name}", f"buildah rm {name}")
    fetched = plan("buildah", source="docker://nvcr.io#nvidia/pytorch:25.03-py3")
    assert commands(fetched)[0].endswith("docker://nvcr.io/nvidia/pytorch:25.03-py3")
    assert "--pull-always" in commands(fetched)[0]


def test_apptainer() -> None:
    """apptainer.org/docs/user/main/cli/apptainer_build.html; what podman and buildah have goes
    through an archive (containers-transports(5))."""
    keys: dict[str, Any] = {"runtime": "apptainer", "image": str(SIF)}
    assert commands(plan("docker", **keys)) == [f"apptainer build {SIF} docker-daemon://app:1"]
    assert commands(plan("podman", **keys)) == [
        f"podman save --format docker-archive --output {SIF}.tar app:1",
        f"apptainer build {SIF} docker-archive:{SIF}.tar",
        f"rm {SIF}.tar",
    ]
    assert commands(plan("buildah", **keys))[0] == (
        f"buildah push app:1 docker-archive:{SIF}.tar:app:1"
    )
    source = plan("", **keys, source="docker://nvcr.io#nvidia/pytorch:25.03-py3")
    assert commands(source) == [f"apptainer build {SIF} docker://nvcr.io/nvidia/pytorch:25.03-py3"]
    local = plan("", **keys, source="podman://app:1")
    assert commands(local)[0].startswith("podman save") and commands(local)[0].endswith(" app:1")


def test_who_serves() -> None:
    assert importer_of(plan("docker", runtime="docker", image="app:1")) is None
    assert importer_of(plan("buildah", source="dockerd://app:1")) is None


# What docker::configure of enroot at 8ea147d (src/docker.sh) wrote for this config
CONFIG = {
    "Env": ["PATH=/opt/venv/bin:/usr/bin", "TWO=a b"],
    "Entrypoint": ["/opt/entry point.sh"],
    "Cmd": ["bash", "-c", "it's"],
    "WorkingDir": "/work",
    "Volumes": {"/b": {}, "/a": {}},
    "Labels": {"org.opencontainers.image.revision": "abc", "x": "y\nz"},
}
RC = """\
# enroot-provenance: podman://app:1
# org.opencontainers.image.revision abc
# x y z

mkdir -p "/work" 2> /dev/null
cd "/work" && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec '/opt/entry point.sh' "$@"
else
    exec '/opt/entry point.sh' 'bash' '-c' 'it'\\''s'
fi
"""


def test_the_files_that_enroot_adds() -> None:
    files = enroot_files(ImageConfig.from_json(CONFIG), "podman://app:1")
    assert files["etc/rc"] == RC
    assert files["etc/environment"] == "PATH=/opt/venv/bin:/usr/bin\nTWO=a b\n"
    bind = "none x-create=dir,bind,rw,nosuid,nodev"
    assert files["etc/fstab"] == (
        f"${{ENROOT_ROOTFS}}/a /a {bind}\n${{ENROOT_ROOTFS}}/b /b {bind}\n"
    )
    bare = enroot_files(ImageConfig.from_json({"Env": None}), "x")
    assert bare["etc/fstab"] == bare["etc/environment"] == ""
    assert "    exec  \"$@\"\nelse\n    exec  '/bin/sh'\nfi\n" in bare["etc/rc"]


@pytest.mark.parametrize(
    "word", ["a b", "it's", "a\tb\\'", "a\u200bb", "\x07é\u2028'", "$(id) `id`"]
)
def test_words_come_back_as_they_were(word: str) -> None:
    argv = ["bash", "-c", f"printf %s {quoted(word)}"]
    done = subprocess.run(argv, capture_output=True, check=True)
    assert done.stdout.decode() == word and done.stderr == b""


def test_the_time_of_an_image() -> None:
    assert creation_time("1970-01-01T00:01:00.123456789Z") == 60
    assert creation_time("") == creation_time("yesterday") == 0


def test_links_of_an_image_are_not_followed_out_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    outside = tmp_path / "passwd"
    outside.write_text("mine")
    (root / "etc/environment").symlink_to(outside)
    configure(root, ImageConfig.from_json(CONFIG), "x", 7)
    assert outside.read_text() == "mine" and (root / "work").is_dir()
    assert (root / "etc/environment").read_text().startswith("PATH=")
    shutil.rmtree(root / "etc")
    (root / "etc").symlink_to(tmp_path)
    with pytest.raises(TrainkitError, match="is a link out of the image"):
        configure(root, ImageConfig.from_json(CONFIG), "x", 7)


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "images/box.sqsh"
    real = real_squashfs(tmp_path / "real.sqsh")
    with published(file) as made:
        assert made.parent == file.parent and not made.exists()
        shutil.copy(real, made)
        assert not file.exists()
    assert file.read_bytes() == real.read_bytes() and list(file.parent.iterdir()) == [file]
    before = file.read_bytes()
    with (
        pytest.raises(TrainkitError, match=r"was not made whole: .* is truncated"),
        published(file) as made,
    ):
        made.write_bytes(real.read_bytes()[:5000])
    with (
        pytest.raises(TrainkitError, match=r"was not made whole: .* cannot be read"),
        published(file),
    ):
        pass
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def stub(folder: Path, name: str, script: str) -> None:
    put_program(folder, name, f"#!/bin/bash\n{script}\n")


def test_enroot_really_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the site's options unless others are asked for; its last words where it fails."""
    real = real_squashfs(tmp_path / "real.sqsh")
    note = f'echo "$ENROOT_SQUASH_OPTIONS|$*" >> {tmp_path}/words'
    stub(tmp_path / "bin", "enroot", f'{note}\ncp {real} "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("ENROOT_SQUASH_OPTIONS", "-comp lz4")
    steps: list[tuple[int, int]] = []
    every: list[dict[str, Any]] = [{}, {"squashfs": {"compression": "zstd"}}]
    for keys in every:
        given = plan("docker", tmp_path, **keys)
        file = run_importer(given, lambda done, of: steps.append((done, of)))
        assert squashfs_problem(file) == ""
    plainly, packed = (tmp_path / "words").read_text().splitlines()
    assert plainly.startswith(f"-comp lz4|import --output {tmp_path}/images/.box.sqsh.tmp-")
    assert plainly.endswith(".sqsh dockerd://app:1")
    assert packed.startswith("-comp zstd -exit-on-error|import") and steps[-1] == (1, 1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("[ERROR] URL https://nvcr.io/v2/ returned error code: 401 Unauthorized", ".credentials"),
        ("FATAL ERROR: Write failed: No space left on device", "ENROOT_TEMP_PATH"),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock", "--builder buildah"),
        ("curl: (6) Could not resolve host: nvcr.io", "https_proxy"),
        ("[ERROR] Invalid image reference: dockerd://A", "docker://[USER@][REGISTRY#]IMAGE"),
        ("something else", "begin"),
    ],
)
def test_enroot_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    """Half of a file is not left."""
    stub(tmp_path / "bin", "enroot", f'echo begin; printf hsqs > "$3"; echo "{said}" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    given = plan("docker", tmp_path)
    with pytest.raises(TrainkitError) as caught:
        run_importer(given)
    assert caught.value.exit == Exit.STAGE_FAILED and said in caught.value.message
    assert words in caught.value.hint and not list((tmp_path / "images").iterdir())


def test_programs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    keys: dict[str, Any] = {"runtime": "apptainer", "image": str(tmp_path / "images/box.sif")}
    for given, hint in (
        (plan("docker", tmp_path), "builder = 'buildah'"),
        (plan("docker", tmp_path, **keys), "install apptainer"),
        (plan("buildah", tmp_path), "install buildah"),
    ):
        with pytest.raises(TrainkitError, match="is not installed on this machine") as caught:
            run_importer(given)
        assert hint in caught.value.hint


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image in a buildah store of its own: a few files."""
    if os.getuid() != 0 or any(shutil.which(name) is None for name in ("buildah", "mksquashfs")):
        pytest.skip("needs buildah and squashfs-tools, as root")
    conf = tmp_path / "storage.conf"
    conf.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/store"\nrunroot = "{tmp_path}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(conf))

    def buildah(*words: str) -> str:
        done = subprocess.run(["buildah", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"buildah does not work here: {done.stderr}")
        return done.stdout.strip()

    name = buildah("from", "scratch")
    root = Path(buildah("mount", name))
    (root / "opt").mkdir()
    (root / "opt/secret").write_text("of root\n")
    (root / "opt/secret").chmod(0o000)
    (root / "opt/noise").write_bytes(os.urandom(200_000))
    (root / "dev").mkdir()
    (root / "dev/left").write_text("no\n")
    buildah("umount", name)
    config = ("--env", "A=b c", "--workingdir", "/work", "--entrypoint", '["/bin/e"]')
    buildah("config", *config, "--label", "l=m", "--volume", "/data", name)
    buildah("commit", "--quiet", "--rm", name, "localhost/app:1")
    return "localhost/app:1"


def test_buildah_really(tmp_path: Path, store: str) -> None:
    """The image's files and enroot's, for any user; no working container is left, not even one
    of a killed import."""
    given = plan("buildah", tmp_path, tag=store, squashfs={"compression": "zstd", "level": 1})
    importer = importer_of(given)
    file = given.image_file
    assert importer is not None and file is not None
    name = importer.commands(given, file)[0][4]
    subprocess.run(["buildah", "from", "--name", name, store], check=True, capture_output=True)
    importer.run(given, file, lambda done, of: None)
    assert squashfs_problem(file) == "" and list(file.parent.iterdir()) == [file]
    listed = subprocess.run(["buildah", "containers", "--json"], capture_output=True, check=True)
    assert json.loads(listed.stdout) is None
    root = tmp_path / "root"
    argv = ["unsquashfs", "-no-progress", "-d", str(root), str(file)]
    subprocess.run(argv, check=True, capture_output=True)
    assert (root / "opt/secret").stat().st_mode & 0o777 == 0o400
    assert (root / "etc/environment").read_text().splitlines()[-1] == "A=b c"
    rc = (root / "etc/rc").read_text()
    assert rc.startswith(f"# enroot-provenance: containers-storage:{store}\n# ")
    assert "# l m\n" in rc and 'cd "/work"' in rc and "exec '/bin/e' \"$@\"" in rc
    assert "/data none x-create=dir" in (root / "etc/fstab").read_text()
    assert (root / "work").is_dir() and (root / "dev").is_dir()
    assert not (root / "dev/left").exists()
    first = file.read_bytes()
    importer.run(given, file, lambda done, of: None)
    assert file.read_bytes() == first, "the same image is the same file"


def test_an_image_that_buildah_has_not(tmp_path: Path, store: str) -> None:
    given = plan("buildah", tmp_path, tag="localhost/none:1")
    with pytest.raises(TrainkitError) as caught:
        run_importer(given)
    assert "`buildah from` exited with 125: the registry has no such image" in str(caught.value)


def test_mksquashfs_leaves_nothing_on_a_full_disk(tmp_path: Path, store: str) -> None:
    small = tmp_path / "images"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (small / "others").write_bytes(b"x" * 60_000)
        given = plan("buildah", tmp_path, tag=store)
        with pytest.raises(TrainkitError, match="the disk is full") as caught:
            run_importer(given)
        assert caught.value.exit == Exit.STAGE_FAILED and "make room" in caught.value.hint
        assert [path.name for path in small.iterdir()] == ["others"]
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)
