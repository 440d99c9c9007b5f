"""Where what is compiled for a foreign engine lies, and the locks that compilers leave there.

torch compiles an extension at its first use into TORCH_EXTENSIONS_DIR/NAME, under a file `lock`
that it creates and keeps open (torch/utils/file_baton.py). One that was killed leaves it, and all
others wait for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.base.documents import canonical_json
from trainkit.base.git import head_commit
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.sources import engine_python, engines_root, source_tree
from trainkit.jobs.schema import Job

LOCK = "lock"
SECONDS = 120.0  # that an interpreter may take to say what it is
# without a change below the folder, after which the owner of a lock on another host counts as dead
QUIET_SECONDS = 900.0
_WHERE = """
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
print(*(found.submodule_search_locations or [] if found else []), sep="\\n")
"""
_CODE = """
import importlib.metadata, json, platform, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps([platform.python_version(), sysconfig.get_config_var("EXT_SUFFIX") or "",
                  version("torch"), version("pybind11")]))
"""


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter says of itself.

    Args:
        path: where it is.
        version: "3.11.7".
        suffix: of its extension modules, ".cpython-311-x86_64-linux-gnu.so".
        torch: the version of its torch; "" where it has none.
        pybind11: the same of pybind11.
    """

    path: Path
    version: str
    suffix: str
    torch: str
    pybind11: str


def ask_interpreter(python: str) -> Interpreter | None:
    """Ask an interpreter what it is; None where it is not here or does not run. One that has not
    changed is asked once in this process."""
    found = shutil.which(python)
    if found is None:
        return None
    path = Path(found).absolute()
    # what changes with packages: the folder that has them, or the marker of a venv of trainkit's
    times = tuple(
        _time(each) for each in (path, *path.parent.parent.glob("lib/python*/*-packages"))
    )
    try:
        return _ask(path, times)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _time(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


@functools.lru_cache(maxsize=16)
def _ask(path: Path, times: tuple[int, ...]) -> Interpreter:
    done = subprocess.run(
        # -I: neither the folder nor PYTHON* variables add packages; versions are read, not imported
        [str(path), "-I", "-c", _CODE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    version, suffix, torch, pybind11 = json.loads(done.stdout)
    return Interpreter(path, version, suffix, torch, pybind11)


def package_folders(python: str, package: str) -> list[Path]:
    """Where an interpreter finds a package, without importing it; none where it has none."""
    asked = ask_interpreter(python)
    if asked is None:
        return []
    done = subprocess.run(
        [str(asked.path), "-I", "-c", _WHERE, package],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return [Path(line) for line in done.stdout.splitlines() if line]


def build_key(job: Job) -> str:
    """Names what is compiled for a job's engine: equal for the same commit, interpreter and
    torch; in a container for the same commit and image."""
    tree = source_tree(job)
    python = str(engine_python(job))
    if job.container is not None:
        runs: list[str] = [job.container.image, python]
    elif (asked := ask_interpreter(python)) is not None:
        runs = [str(asked.path), asked.version, asked.torch]
    else:
        runs = [python]
    digest = hashlib.sha256(canonical_json([str(tree), head_commit(tree), runs]).encode())
    return f"{tree.name}-{digest.hexdigest()[:12]}"


def extensions_folder(job: Job) -> Path:
    """TORCH_EXTENSIONS_DIR of the job's ranks: <root>/engines/extensions/KEY."""
    return engines_root(job) / "extensions" / build_key(job)


def tools_folder(job: Job) -> Path:
    """<root>/engines/tools/KEY: python3 and python3-config of the engine's interpreter, for
    Makefiles that ask the first ones of PATH. The stage engine-prebuild writes them."""
    return engines_root(job) / "tools" / build_key(job)


def engine_path(job: Job) -> tuple[Path, ...]:
    """Folders that come first on PATH when the engine or its Makefiles run; none in a container,
    whose image has its own."""
    if job.container is not None:
        return ()
    asked = ask_interpreter(str(engine_python(job)))
    if asked is None:
        return (tools_folder(job),)
    return (tools_folder(job), asked.path.parent)


@dataclass(frozen=True)
class LeftLock:
    """A lock that nobody on this host holds.

    Args:
        path: the file.
        dead: its owner is known to be dead; else it may live on another host.
    """

    path: Path
    dead: bool


def left_locks(folder: Path, *, shared: bool) -> list[LeftLock]:
    """Locks below `folder` that no process of this host holds.

    Args:
        folder: of extensions; it may be missing.
        shared: other hosts may compile there, too: an owner counts as dead when nothing has
            changed beside its lock for 15 minutes.
    """
    locks = sorted(path for path in folder.rglob(LOCK) if path.is_file())
    if not locks:
        return []
    held = set(_open_files())
    found = []
    for path in locks:
        with contextlib.suppress(OSError):  # its owner has just let it go
            status = path.stat()
            if (status.st_dev, status.st_ino) in held:
                continue
            unseen = status.st_uid != os.geteuid() != 0  # whose open files we cannot list
            dead = not (shared or unseen) or _quiet(path.parent)
            found.append(LeftLock(path, dead))
    return found


def _open_files() -> Iterator[tuple[int, int]]:
    """Device and inode of every file that a process of this host has open (proc(5)); those of
    other users only for root."""
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another user's, or it has ended
            for handle in os.scandir(f"{process.path}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(handle.path)
                    yield status.st_dev, status.st_ino


def _quiet(folder: Path) -> bool:
    """Whether nothing in the folder has changed for a while."""
    newest = folder.stat().st_mtime
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest > QUIET_SECONDS


def remove_dead_locks(folder: Path, *, shared: bool) -> tuple[list[Path], list[Path]]:
    """Remove locks of dead owners below `folder`: (those that are removed, those that nobody
    here holds and that were left). Arguments as of `left_locks`."""
    removed = []
    kept = []
    for lock in left_locks(folder, shared=shared):
        if lock.dead:
            lock.path.unlink(missing_ok=True)
            removed.append(lock.path)
        else:
            kept.append(lock.path)
    return removed, kept
