"""Real images without a registry: a base made of this machine's own Debian packages, a store of
buildah's that is gone with the tests, and enroot's stand-in.

The base takes a minute, and is kept for the next test runs of this machine, below
`$TRAINKIT_TEST_CACHE` or ~/.cache/trainkit-tests, in a store that is read from and never written
to again. What tests build is in a store of the test run's.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import oci
from tests.images import enroot_stand_in
from tests.mounts import unmount
from tests.programs import put_program
from trainkit.base.locks import locked

CACHE = "TRAINKIT_TEST_CACHE"
TORCH = "localhost/trainkit-test/torch:1"
TINY = "localhost/trainkit-test/tiny:1"
PACKAGES = ("ca-certificates", "g++", "python3", "python3-dev", "python3-pip", "python3-venv")
PROGRAMS = ("buildah", "mmdebstrap", "mksquashfs", "unsquashfs", "bwrap", "runc")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PIP_SETTINGS = ("cert", "index-url", "find-links", "default-timeout", "proxy")
# a third of torch, for its own tests and for compiling
UNUSED = re.compile(r"torch/(test|include)/|torch/bin/(?!torch_shm)|torch/lib/.*\.a$|.*/tests/")
KEPT = 7 * 86400.0  # seconds that a base which nobody uses is kept
UNREAD = ("doc", "info", "locale", "man")  # of Debian's packages
# What trainkit compiles in an image is there for some steps of a test: not optimized, it is
# compiled in half the time.
COMPILER = """#!/bin/sh
exec /usr/bin/$(basename "$0") "$@" -O0
"""
RECIPE = 2  # raised where the code below makes another base of the same packages


class NoLab(Exception):
    """Why no image is built on this machine."""


@dataclass(frozen=True)
class Lab:
    """What tests that build need.

    Args:
        folder: theirs, gone after the test run.
        variables: by which buildah and podman find the store and the base, and invoke the
            stand-in for enroot.
        tiny: the same for builds on TINY, whose steps see this machine's /usr.
    """

    folder: Path
    variables: Mapping[str, str]
    tiny: Mapping[str, str]

    def call(self, *argv: str) -> str:
        """What a program prints; fails unless it succeeds."""
        return _call(argv, self.variables)

    @property
    def programs(self) -> Path:
        """The folder with `enroot`."""
        return self.folder / "bin"


def _call(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def needs(*more: str) -> None:
    """Raise NoLab where this machine cannot build images.

    Args:
        more: programs beside PROGRAMS.
    """
    if os.getuid() != 0:
        raise NoLab("images are built as root")
    missing = [name for name in (*PROGRAMS, *more) if shutil.which(name) is None]
    if missing:
        raise NoLab(f"images need {', '.join(missing)}")


def suite() -> str:
    """Debian's or Ubuntu's name of this machine's release, whose Python is also that of the
    tests: what they copy into the base has to run there."""
    lines = Path("/etc/os-release").read_text().splitlines()
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    name = release.get("VERSION_CODENAME", "").strip('"')
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    argv = ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    theirs = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    if not name or not Path("/etc/debian_version").exists():
        raise NoLab("the base image is made of Debian's or Ubuntu's packages, which are not here")
    if own != theirs:
        raise NoLab(f"the release's Python is {theirs or 'not there'}, the tests' is {own}")
    return name


def store_variables(folder: Path, volumes: Sequence[str], below: Path | None) -> dict[str, str]:
    """Write settings of buildah's and podman's; the variables that name them.

    Formats: containers-storage.conf(5), containers.conf(5).

    Args:
        folder: of the store.
        volumes: HOST:CONTAINER:ro, which every step of a build sees.
        below: another store, which is read from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["[storage]", 'driver = "overlay"', f'graphroot = "{folder}/store"']
    lines.append(f'runroot = "{folder}/state"')
    if below is not None:
        lines += ["[storage.options]", f'additionalimagestores = ["{below}/store"]']
    (folder / "storage.conf").write_text("\n".join(lines) + "\n")
    engine = 'runtime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    name = "tiny.conf" if any(each.startswith("/usr:") for each in volumes) else "containers.conf"
    (folder / name).write_text(f"[containers]\nvolumes = {json.dumps(volumes)}\n[engine]\n{engine}")
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / name),
        "BUILDAH_ISOLATION": "chroot",
    }


def pip_volumes(folder: Path) -> list[str]:
    """What of this machine pip needs inside of a build: its settings, its folders of wheels, and
    the certificates that this machine trusts. Nothing of it is in an image."""
    listed = _call([sys.executable, "-m", "pip", "config", "list"], {})
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'")
    kept = {key: found[key] for key in PIP_SETTINGS if key in found}
    settings = folder / "pip.conf"
    settings.write_text("[global]\n" + "".join(f"{key} = {kept[key]}\n" for key in kept))
    places = {CERTIFICATES, kept.get("cert", CERTIFICATES), *kept.get("find-links", "").split()}
    mounts = [f"{path}:{path}:ro" for path in sorted(places) if Path(path).exists()]
    return [f"{settings}:/etc/pip.conf:ro", *mounts]


def requirements() -> list[importlib.metadata.Distribution]:
    """The installed packages that trainkit requires, and those that they require."""
    waiting = ["trainkit-lm"]
    found: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                waiting.append(wanted.name)
    del found["trainkit-lm"]
    return [found[name] for name in sorted(found)]


def copy_packages(target: Path) -> None:
    """Copy the packages, with what Python has compiled of them: torch need not be fetched."""
    for package in requirements():
        for entry in package.files or ():
            if ".." in entry.parts or UNUSED.match(str(entry)):
                continue
            source = Path(str(package.locate_file(entry)))
            compiled = Path(importlib.util.cache_from_source(str(source)))
            for path in (source, compiled if source.suffix == ".py" else source):
                goal = target / path.relative_to(str(package.locate_file("")))
                if path.is_file() and not goal.exists():
                    goal.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, goal)


def cached_base() -> Path:
    """The folder of the store with TORCH and TINY; made where this machine has none.

    Raises:
        NoLab: this machine cannot make it.
    """
    release = suite()
    versions = [f"{package.name}=={package.version}" for package in requirements()]
    made_of = [RECIPE, release, PACKAGES, UNREAD, COMPILER, UNUSED.pattern]
    inputs = [*made_of, sys.version_info[:2], versions]
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]
    home = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "trainkit-tests")
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"base-{key}"
    with locked(home / "lock", {}):
        if not (folder / "made").exists():
            for other in home.glob("base-*"):
                if not is_used(other):
                    remove_store(other)
            try:
                make_base(folder, release)
            except AssertionError as error:
                raise NoLab(f"no base image can be made: {error}") from None
            finally:
                unmount(folder)
        (folder / "made").touch()
    return folder


def is_used(folder: Path) -> bool:
    """Whether a base was made, and used in the last days: by another checkout, perhaps just now."""
    try:
        return time.time() - (folder / "made").stat().st_mtime < KEPT
    except FileNotFoundError:
        return False


def make_base(folder: Path, release: str) -> None:
    """Make the two images."""
    variables = store_variables(folder, [], None)
    with new_image(variables, "scratch", TORCH) as root:
        options = ["--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--quiet"]
        options += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNREAD]
        argv = ["mmdebstrap", *options, f"--include={','.join(PACKAGES)}", release, str(root)]
        _call(argv, {"TMPDIR": "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"})
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        copy_packages(root / f"usr/local/lib/python{version}/dist-packages")
        for program in (root / "usr/bin").glob("*-linux-gnu-g[+c][+c]"):
            put_program(root / "usr/local/bin", program.name, COMPILER)
    files = tarfile.open(fileobj=io.BytesIO(oci.rootfs()))  # noqa: SIM115
    with files as tar, new_image(variables, "scratch", TINY) as root:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # from Python 3.11.4 on
        tar.extractall(root)


@contextlib.contextmanager
def new_image(variables: Mapping[str, str], base: str, name: str) -> Iterator[Path]:
    """The root of a container, which is an image afterwards."""
    container = _call(["buildah", "from", "--pull-never", base], variables).strip()
    yield Path(_call(["buildah", "mount", container], variables).strip())
    _call(["buildah", "umount", container], variables)
    _call(["buildah", "commit", "--quiet", "--rm", container, name], variables)


def remove_store(folder: Path) -> None:
    """Remove a store with all that is in it."""
    unmount(folder)
    shutil.rmtree(folder, ignore_errors=True)


def make_lab(folder: Path) -> Lab:
    """A lab over the base of this machine.

    Raises:
        NoLab: there can be none.
    """
    needs()
    base = cached_base()
    folder.mkdir(parents=True, exist_ok=True)
    programs = enroot_stand_in.install(folder / "bin")
    variables = store_variables(folder, pip_volumes(folder), base)
    tiny = store_variables(folder, ["/usr:/usr:ro"], base)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "ENROOT_DATA_PATH": f"{folder}/enroot"}
    return Lab(folder, {**variables, **path}, {**tiny, **path})
