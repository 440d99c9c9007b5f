"""Pack what the GPU proof needs on a machine without a network into one folder of at most 40 MiB:

    python -m benchmarks.gpu.pack FOLDER [--python-version 3.12] [--interpreter PATH]

Wheels of all that the trainer and its tasks import, in the versions of constraints.txt, for that
Python on Linux x86-64 (torch never: it is there, built for its GPU); the compiled helper, where an
interpreter of that version is here, else it is compiled there (pybind11 and setuptools are packed);
the prepared text; a manifest with the hash of each file. FOLDER is made afresh. Needs pip and a
network or an index of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.hardware import today
from benchmarks.gpu.packed import MANIFEST, ROOT, SCHEMA
from benchmarks.gpu.packed_text import write_text_data
from benchmarks.gpu.sessions import text_dataset
from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import sha256_file, write_json
from trainkit.base.install import csrc_sha256

MOST_BYTES = 40 * 2**20
# what the trainer, the tasks and the build of the helper import, and what that needs
NEEDED = (
    "absl-py",  # tensorboard's; its other needs are of its server
    "annotated-types",
    "ClusterShell",
    "invoke",
    "markdown-it-py",
    "mdurl",
    "numpy",
    "orjson",
    "packaging",
    "protobuf",
    "psutil",
    "pybind11",
    "pydantic",
    "pydantic_core",
    "Pygments",
    "PyYAML",
    "rich",
    "safetensors",
    "setuptools",
    "tensorboard",
    "tokenizers",
    "tomli",
    "typing-inspection",
    "typing_extensions",
    "xxhash",
    "zstandard",
)
# pip takes each exactly (PEP 600); any: pure Python
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


def pins(text: str, names: Sequence[str]) -> list[str]:
    """NAME==VERSION of each name, by the text of constraints.txt. Raises ConfigError for a name
    that is not in it."""
    found = {}
    for line in text.splitlines():
        name, separator, version = line.partition("==")
        if separator and not line.startswith("#"):
            found[_normal(name)] = version.strip()
    absent = [name for name in names if _normal(name) not in found]
    if absent:
        raise ConfigError(f"constraints.txt has no {', '.join(absent)}")
    return [f"{name}=={found[_normal(name)]}" for name in names]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(target: Path, python_version: str) -> None:
    """Fetch the wheels. Raises TrainkitError (exit 6) where pip cannot."""
    wanted = pins((ROOT / "constraints.txt").read_text(), NEEDED)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    argv += ["--only-binary", ":all:", "--implementation", "cp"]
    argv += ["--python-version", python_version, "--dest", str(target)]
    argv += [word for platform in PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run([*argv, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise TrainkitError(
            f"pip ended with {done.returncode}: {last}",
            exit=Exit.STAGE_FAILED,
            hint="packing needs an index that has these versions for that Python",
        )


def compile_helper(interpreter: str, wheels: Path, target: Path) -> Path | None:
    """The helper for that interpreter, compiled with the packed pybind11 and setuptools; None
    where the interpreter has no headers or there is no compiler."""
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        for wheel in [*wheels.glob("pybind11-*"), *wheels.glob("setuptools-*")]:
            shutil.unpack_archive(wheel, site, "zip")
        where = ["--build-lib", f"{temporary}/lib", "--build-temp", f"{temporary}/temp"]
        done = subprocess.run(
            [interpreter, "setup.py", "build_ext", *where],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        made = list(Path(temporary, "lib", "trainkit").glob("_index.*"))
        if done.returncode or len(made) != 1:
            return None
        target.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(made[0], target))


def find_interpreter(version: str) -> str | None:
    """python3.X on PATH or below pyenv's folder, where it is that version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    places = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    say = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        done = subprocess.run(
            [str(place), "-I", "-S", "-c", say], capture_output=True, text=True, check=False
        )
        if done.stdout.strip() == version:
            return str(place)
    return None


def pack(folder: Path, python_version: str, interpreter: str | None) -> dict[str, object]:
    """Make the folder; returns its manifest.

    Args:
        folder: replaced, where it is a packed folder.
        python_version: of the machine it is for, "3.12".
        interpreter: one of that version; None: looked for.

    Raises:
        ConfigError: the folder is there and is not a packed one.
        TrainkitError: pip failed, or it is too large (exit 6).
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} has other files in it", hint="name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    download(wheels, python_version)
    found = interpreter or find_interpreter(python_version)
    helper = None
    if found is not None:
        helper = compile_helper(found, wheels, folder / "helper")
    with tempfile.TemporaryDirectory() as root:
        write_text_data(Path(root), text_dataset())
        dataset = text_dataset()
        assert dataset.tokenizer is not None
        made = Path(root, "data", dataset.name, dataset.tokenizer.name)
        shutil.copytree(made, folder / "data")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    if size > MOST_BYTES:
        raise TrainkitError(
            f"{folder} has {size / 2**20:.1f} MiB; {MOST_BYTES / 2**20:.0f} MiB can travel",
            exit=Exit.STAGE_FAILED,
            hint="look at the largest files of wheels/",
        )
    manifest = document(
        SCHEMA,
        python=python_version,
        platform="linux x86_64",
        date=today(),
        csrc_sha256=csrc_sha256(ROOT),
        helper=helper is not None,
        bytes=size,
        files={str(path.relative_to(folder)): sha256_file(path) for path in paths},
    )
    write_json(folder / MANIFEST, manifest)
    return manifest


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12", help="of the machine it is for")
    parser.add_argument("--interpreter", help="one of that version, to compile the helper for")
    given = parser.parse_args(argv)
    try:
        made = pack(given.folder.absolute(), given.python_version, given.interpreter)
    except TrainkitError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return int(error.exit)
    files = made["files"]
    assert isinstance(files, dict)
    helper = "compiled"
    if not made["helper"]:
        helper = f"to be compiled there: no Python {given.python_version} with headers here"
    print(f"{given.folder}: {len(files)} files, {int(str(made['bytes'])) / 2**20:.1f} MiB")
    print(f"for Python {given.python_version}; helper: {helper}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
