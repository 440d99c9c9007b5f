"""Makes the Python environment of an image, a layer each: `install.py torch`, then `packages` and
`trainkit`, or `engine` for a training engine of somebody else's.

Run by the Dockerfiles of this folder with the base image's own Python, before anything is
installed: standard library and pip only, Python 3.8 or newer. torch is large and seldom changes;
`packages` are what pyproject.toml lists; `trainkit` goes into a folder of its own, whose content
is then copied over the environment; `engine` are the lines of trainkit/engines/requirements.toml.

The same packages give the same bytes twice: no caches, and compiled files (.pyc) that hold a hash
of their source in place of its time. They are made here because users other than root cannot
write them later, and without them each rank compiles torch's Python files at its start.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VENV = Path("/opt/venv")
TRAINKIT = Path("/opt/prefix")  # lib/ and bin/ that belong into VENV
BASE = "base"  # TORCH=base: torch is in the base image
OLDEST_PYTHON = (3, 11)
PARTS = 4  # processes that compile; fixed, since a .pyc depends on what was compiled before it
EXIT_USAGE = 3
# What only tests read: 190 MB with torch 2.13 for CPUs. torch's headers stay: torch.compile reads
# them. So do all of pyarrow's libraries: they are linked to each other.
UNUSED = (
    "torch/test",
    "torch/lib/*.a",
    "torch/bin/[!t]*",
    "torch/bin/test_*",
)
TESTS = ("numpy", "sympy", "networkx", "pyarrow", "mpmath", "fsspec")  # folders named tests


class InstallError(Exception):
    """The image cannot be made like this; the text says what to do."""


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; Python 3.11 has a reader, and before it pip brings the same one."""
    name = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"
    found: dict[str, Any] = importlib.import_module(name).loads(path.read_text(encoding="utf-8"))
    return found


def name_of(requirement: str) -> str:
    """The package's name in a requirement, normalized (PEP 503)."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise InstallError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """What pyproject.toml lists, and the extras' lists, without torch: its step came before.

    Raises:
        InstallError: there is no such extra.
    """
    project = read_toml(pyproject)["project"]
    lines = list(project["dependencies"])
    optional = project["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            raise InstallError(f"EXTRAS: no extra {extra!r} in {pyproject}; {sorted(optional)}")
        lines += optional[extra]
    return [line for line in lines if name_of(line) != "torch"]


def engine_lines(table: Path, engine: str, version: str) -> list[str]:
    """What pip is given for an engine: the lines of the longest beginning of its version, as the
    stage engine-install takes them; without torch.

    Raises:
        InstallError: the table has none for it.
    """
    lines = read_toml(table)["lines"]
    known = [each for each in lines if each["engine"] == engine]
    fitting = [each for each in known if version.startswith(each["version"])]
    if not fitting:
        versions = ", ".join(f"{each['engine']} {each['version']}" for each in lines)
        raise InstallError(
            f"ENGINE={engine} ENGINE_VERSION={version}: {table.name} has lines for {versions}"
        )
    best = max(fitting, key=lambda each: len(each["version"]))
    return [line for line in best["pip"] if name_of(line) != "torch"]


def write_constraints(source: Path, target: Path, free: set[str]) -> None:
    """constraints.txt without the lines of the packages that build arguments choose."""
    lines = source.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line[:1] in ("", "#") or name_of(line) not in free]
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")


def pip(*arguments: str) -> None:
    """Run the base image's pip for the environment, without caches.

    PIP_CONSTRAINT is not passed on: NVIDIA's images pin numpy and others with it for torch's sake.

    Raises:
        InstallError: pip failed; it has said why.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # of pip itself: with times in them
    command = [sys.executable, "-m", "pip", "--python", str(VENV / "bin" / "python"), "install"]
    options = ["--no-cache-dir", "--no-compile", "--root-user-action=ignore"]
    if subprocess.run([*command, *options, *arguments], env=environment, check=False).returncode:
        raise InstallError(f"pip install {' '.join(arguments)} failed: its message is above")


def packages_folder(prefix: Path) -> Path:
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def remove_unused(folder: Path) -> None:
    """Remove what is only read by tests of packages."""
    for pattern in UNUSED:
        for path in sorted(folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for package in TESTS:
        for path in sorted((folder / package).rglob("tests")):
            shutil.rmtree(path, ignore_errors=True)


def compile_part(folder: Path, part: int) -> None:
    """Compile each PARTS-th source below a folder that has no compiled file yet. What is no
    Python 3 (templates of packages) stays as it is."""
    for source in sorted(folder.rglob("*.py"))[part::PARTS]:
        compiled = Path(importlib.util.cache_from_source(str(source)))
        if not compiled.exists():
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), quiet=2, invalidation_mode=mode)


def compile_all(folder: Path) -> None:
    """Compile all sources below a folder, in PARTS new interpreters, whose order of sets is fixed.

    Raises:
        InstallError: one of them failed.
    """
    python = str(VENV / "bin" / "python")
    command = [python, __file__, "compile", "--folder", str(folder), "--part"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    running = [subprocess.Popen([*command, str(part)], env=environment) for part in range(PARTS)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise InstallError(f"compiling {folder} failed: the message is above")


def torch_version() -> str:
    """That of the environment.

    Raises:
        InstallError: torch cannot be imported; its own message is above.
    """
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-B", "-c", "import torch; print(torch.__version__)"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InstallError(
            "`import torch` fails in the image: give another BASE_IMAGE, or a TORCH that fits it"
        )
    return done.stdout.strip()


def refuse_untried(python: Sequence[int], torch: str, pyproject: Path) -> None:
    """Refuse a Python or a torch that trainkit itself was not tried with.

    Args:
        python: its version.
        torch: version of torch.
        pyproject: the file that says which releases of torch were tried.

    Raises:
        InstallError: it says which build arguments help.
    """
    wanted = ".".join(str(number) for number in OLDEST_PYTHON)
    if tuple(python) < OLDEST_PYTHON:
        version = ".".join(str(number) for number in python)
        raise InstallError(
            f"the base image's python3 is {version}, trainkit needs {wanted}: another BASE_IMAGE"
        )
    lines = read_toml(pyproject)["project"]["dependencies"]
    line = next(line for line in lines if name_of(line) == "torch")
    least, below = re.findall(r"\d+\.\d+", line)
    found = re.match(r"\d+\.\d+", torch)
    if found is None or not numbers(least) <= numbers(found.group()) < numbers(below):
        raise InstallError(
            f"the image has torch {torch}, trainkit was tried with {line}: give another"
            f" BASE_IMAGE, or --build-arg 'TORCH={line}' to install one"
        )


def numbers(version: str) -> list[int]:
    """Those of a version, for comparing."""
    return [int(number) for number in version.split(".")]


def install_torch(build: Path) -> None:
    """Make the environment, and install what TORCH names."""
    torch = os.environ.get("TORCH", "").split()
    if not torch:
        raise InstallError(f"--build-arg TORCH= is {BASE!r} or a requirement, as torch==2.13.0")
    in_base = torch == [BASE]
    venv.create(VENV, system_site_packages=in_base, symlinks=True, with_pip=False)
    write_constraints(build / "constraints.txt", build / "constraints", {name_of(torch[0])})
    if not in_base:
        index = os.environ.get("TORCH_INDEX", "")
        options = ["--index-url", index] if index else []
        pip("-c", str(build / "constraints"), *options, *torch)
    print(f"torch {torch_version()}", flush=True)


def install_packages(build: Path) -> None:
    """Install trainkit's requirements, those of EXTRAS, and PIP_PACKAGES.

    Raises:
        InstallError: Python or torch is too old, or pip failed.
    """
    refuse_untried(sys.version_info[:2], torch_version(), build / "pyproject.toml")
    more = os.environ.get("PIP_PACKAGES", "").split()
    lines = requirements(build / "pyproject.toml", os.environ.get("EXTRAS", "").split())
    free = {"torch", *(name_of(line) for line in more)}
    write_constraints(build / "constraints.txt", build / "constraints", free)
    pip("-c", str(build / "constraints"), *lines, *more)


def install_trainkit(build: Path) -> None:
    """Compile and install trainkit itself into a folder of its own."""
    pip("--no-deps", "--no-build-isolation", f"--prefix={TRAINKIT}", str(build))


def install_engine(build: Path) -> None:
    """Install what ENGINE needs, and PIP_PACKAGES. The engine itself is a tree that trainkit's
    stage engine-source fetches; its kernels are compiled there, by engine-prebuild."""
    more = os.environ.get("PIP_PACKAGES", "").split()
    engine = os.environ.get("ENGINE", "")
    lines = engine_lines(build / "requirements.toml", engine, os.environ.get("ENGINE_VERSION", ""))
    named = {name_of(line) for line in more}
    pip(*(line for line in lines if name_of(line) not in named), *more)


def finish(prefix: Path) -> None:
    """Remove what nothing reads, and compile the rest."""
    folder = packages_folder(prefix)
    remove_unused(folder)
    compile_all(folder)


def run(arguments: argparse.Namespace) -> None:
    """One step.

    Raises:
        InstallError: the image cannot be made like this.
    """
    build = Path(__file__).resolve().parent
    if arguments.step == "compile":
        compile_part(Path(arguments.folder), arguments.part)
        return
    prefix = TRAINKIT if arguments.step == "trainkit" else VENV
    STEPS[arguments.step](build)
    finish(prefix)


STEPS = {
    "torch": install_torch,
    "packages": install_packages,
    "trainkit": install_trainkit,
    "engine": install_engine,
}


def main() -> int:
    """Run one step; 0, or 3 with a message."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=[*STEPS, "compile"])
    parser.add_argument("--folder", default="")
    parser.add_argument("--part", type=int, default=0)
    os.umask(0o022)  # readable by all who run the image
    try:
        run(parser.parse_args())
    except InstallError as error:
        print(f"install.py: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
