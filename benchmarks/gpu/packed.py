"""The folder that `pack` makes and `prove` uses: wheels, the compiled helper, prepared text, and a
manifest with the hash of each file. Standard library and trainkit.base only.

    gpu-pack.json     gpu-pack/1: {python, platform, csrc_sha256, files: {path: sha256}, ...}
    wheels/           what trainkit needs besides torch; pure, or for that Python and platform
    helper/           trainkit/_index.*.so, where it could be compiled here
    data/             two datasets of the proof, tokenized, with their tokenizer
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import sha256_file, write_text
from trainkit.base.install import (
    InstallError,
    build_extension,
    csrc_sha256,
    extension_is_current,
)
from trainkit.ops.build import build_kernels, staleness

MANIFEST = "gpu-pack.json"
SCHEMA = "gpu-pack/1"
# never exchanged for a packed one: what else is installed there was built beside them, and torch
# 2.11 asks for a setuptools before 82
KEPT = ("numpy", "setuptools", "torch", "triton")
ROOM = 1.2  # free space asked for, in parts of what is unpacked
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Pack:
    """A packed folder whose files are those of its manifest.

    Args:
        folder: where it lies.
        python: version that its wheels are for, "3.12".
        csrc_sha256: of the sources of its helper.
        files: sha256 of each file, by its path in the folder.
    """

    folder: Path
    python: str
    csrc_sha256: str
    files: Mapping[str, str]

    @property
    def wheels(self) -> list[Path]:
        return [self.folder / name for name in self.files if name.endswith(".whl")]

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def helper(self) -> Path | None:
        """The compiled helper; None where it is to be compiled on the machine itself."""
        found = [self.folder / name for name in self.files if name.startswith("helper/")]
        return next(iter(found), None)


def read_pack(folder: Path) -> Pack:
    """Read a packed folder and compare every file with its hash.

    Raises:
        ConfigError: there is none, or a file of it is missing or another (exit 3).
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a packed folder: it has no {MANIFEST}",
            hint="python -m benchmarks.gpu.pack FOLDER makes one, where there is a network",
        )
    said = read_document(path, SCHEMA)
    files = {str(name): str(digest) for name, digest in said["files"].items()}
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != digest:
            raise ConfigError(
                f"{folder / name} is missing or not what {MANIFEST} says",
                hint="pack the folder again, or copy it again",
            )
    return Pack(folder, str(said["python"]), str(said["csrc_sha256"]), files)


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: 2.11.0+cu130 is (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def wheel_name(wheel: Path) -> tuple[str, str]:
    """(distribution in its normal form, version) of a wheel's file name (PyPA, binary distribution
    format)."""
    name, version, *_ = wheel.name.split("-")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def missing_wheels(wheels: list[Path], installed: Mapping[str, str]) -> Iterator[Path]:
    """The wheels of what is not installed, or older than the wheel."""
    for wheel in wheels:
        name, version = wheel_name(wheel)
        there = installed.get(name)
        if there is None or (name not in KEPT and version_key(there) < version_key(version)):
            yield wheel


def installed_here() -> dict[str, str]:
    """Versions of all that this interpreter can import, by distribution in its normal form."""
    found: dict[str, str] = {}
    for one in distributions():
        # the first on the path is what is imported
        found.setdefault(re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower(), one.version)
    return found


def _unpack(wheels: list[Path], site: Path) -> None:
    """Put wheels into a folder of the import path. Raises TrainkitError (exit 10) where there is no
    room for them."""
    size = sum(entry.file_size for wheel in wheels for entry in zipfile.ZipFile(wheel).infolist())
    site.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(site).free
    if free < ROOM * size:
        raise TrainkitError(
            f"{site} has {free / 2**20:.0f} MiB free; {len(wheels)} wheels take"
            f" {size / 2**20:.0f} MiB",
            exit=Exit.RANK_INFRA,
            hint="name another folder with --results",
        )
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def prepare_python(pack: Pack, folder: Path, *, root: Path = ROOT) -> Path:
    """An interpreter that has this one's packages, the packed ones that it lacks, and this
    checkout, also under -I: a venv with one .pth file in it. The helper is there afterwards.

    Args:
        pack: what is packed.
        folder: where the venv and the unpacked wheels go; made afresh.
        root: the checkout.

    Raises:
        ConfigError: the pack is for another Python.
        TrainkitError: no room (exit 10), or the helper cannot be compiled (exit 6).
    """
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if pack.python != own:
        raise ConfigError(
            f"{pack.folder} is packed for Python {pack.python}; this is {own}",
            hint=f"python -m benchmarks.gpu.pack FOLDER --python-version {own}",
        )
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site"
    _unpack(list(missing_wheels(pack.wheels, installed_here())), site)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    own_site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    write_text(own_site / "proof.pth", "\n".join(map(str, [site, root, *others])) + "\n")
    _place_helper(pack, python, root)
    return python


def _place_helper(pack: Pack, python: Path, root: Path) -> None:
    """The packed helper beside the package where it is of these sources; else it is compiled."""
    if extension_is_current(root) and _imports(python, "trainkit._index"):
        return
    if pack.helper is not None and pack.csrc_sha256 == csrc_sha256(root):
        shutil.copy2(pack.helper, root / "trainkit" / pack.helper.name)
        if _imports(python, "trainkit._index"):
            return
    try:
        build_extension(root, python)
    except (OSError, InstallError) as error:
        raise TrainkitError(
            f"the helper of data indexes cannot be compiled: {error}",
            exit=Exit.STAGE_FAILED,
            hint="pack the folder where a compiler and that Python are",
        ) from error


def place_kernels(python: Path, *, root: Path = ROOT) -> None:
    """Compile the fused kernels for CPUs with the headers of the torch that is here: what is packed
    knows no torch. Where they cannot be, that is said, and their part says it again."""
    if not staleness(root):
        return
    try:
        build_kernels(root, python)
    except InstallError as error:
        print(f"WARNING: {error}", file=sys.stderr, flush=True)


def _imports(python: Path, module: str) -> bool:
    done = subprocess.run(
        [python, "-I", "-c", f"import {module}"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode == 0
