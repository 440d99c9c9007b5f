"""The code a run executes, named by its content: the trainkit package with its built extension
and, where the experiments lie in another git repository, that repository's tracked and
uncommitted files.

Editing the checkout changes nothing in a run that has started, and a resumed run has the code it
began with.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import NamedTuple

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import (
    fsync_folder,
    publish_folder,
    sha256_files,
    sha256_tree,
    temporary_name,
    write_json,
    write_text,
)
from trainkit.base.git import git_answer
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.snapshot_files import COMPLETE_FILE, ORIGIN_FILE, package_files

PROJECT = "project"  # the folder of a snapshot that holds the user's repository
LARGEST = 10 * 2**20  # bytes of one of its files: more is data
WHOLE = 256 * 2**20  # bytes of all of them
# what trainkit itself keeps below a root
OWN = ("runs", "code", "data", "stamps", "quarantine", "sessions")


@dataclass(frozen=True)
class ExcludedFile:
    """A file of the repository that is not in the snapshot."""

    path: str
    bytes: int
    why: str


class Snapshot(NamedTuple):
    """A snapshot on disk."""

    sha256: str
    folder: Path
    left_out: tuple[ExcludedFile, ...]


def take_snapshot(package: Path, code: Path, project: Path | None = None) -> Snapshot:
    """Copy the code below <root>/code/<sha256> unless that very content is there.

    Args:
        package: the folder of the trainkit package.
        code: <root>/code.
        project: the folder of jobs.toml; None: only the package.

    Raises ConfigError where git cannot list the project's files.
    """
    repository = _repository(project, package) if project is not None else None
    if repository is not None:
        found, left_out = _project_files(repository, code.parent)
    else:
        found = []
        left_out = ()
    sources = {name: package.parent / name for name in package_files(package)} | {
        f"{PROJECT}/{name}": repository / name for name in found if repository
    }
    target = code / sha256_files(sources)
    if (target / COMPLETE_FILE).is_file():
        return Snapshot(target.name, target, left_out)
    code.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(code / "new")
    try:
        target = code / (digest := _copied(sources, temporary))
        if not (target / COMPLETE_FILE).is_file():
            about = {
                "files": sorted(sources),
                "project": str(repository) if repository else None,
                "left_out": [vars(each) for each in left_out],
            }
            write_json(temporary / ORIGIN_FILE, document("snapshot/1", **about))
            write_text(temporary / COMPLETE_FILE, digest + "\n")
            try:
                publish_folder(temporary, target)
            except OSError:
                # else another run published the same content first
                if not (target / COMPLETE_FILE).is_file():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Snapshot(digest, target, left_out)


def _copied(sources: dict[str, Path], folder: Path) -> str:
    """Copy files to their names below `folder`, durably; returns the hash of what was copied: a
    file may be edited meanwhile."""
    for parent in {folder / name for name in map(os.path.dirname, sources)}:
        parent.mkdir(parents=True, exist_ok=True)

    def copy(item: tuple[str, Path]) -> None:
        name, source = item
        with open(source, "rb") as original, open(folder / name, "wb") as target:
            seen = os.fstat(original.fileno())
            shutil.copyfileobj(original, target, 2**20)
            target.flush()
            os.fsync(target.fileno())
            if os.access(source, os.X_OK):
                os.fchmod(target.fileno(), os.stat(target.fileno()).st_mode | 0o111)
        if name.endswith(".py") and not name.startswith(f"{PROJECT}/"):
            _link_bytecode(source, seen, folder / name)

    with ThreadPoolExecutor(16) as pool:  # a shared file system answers slowly, but many at once
        list(pool.map(copy, sources.items()))
        list(pool.map(fsync_folder, [Path(where) for where, *_ in os.walk(folder)]))
    return sha256_tree(folder, list(sources))


def _link_bytecode(source: Path, seen: os.stat_result, copy: Path) -> None:
    """Give the copy of a module, of which `seen` is the source, the bytecode that this has, so that
    what starts first from new code need not compile it. It is a link, on the same file system:
    Python never writes into such a file, it replaces it."""
    link = Path(cache_from_source(copy))
    try:
        link.parent.mkdir(exist_ok=True)
        link.hardlink_to(cache_from_source(source))
        good = _is_bytecode_of(link, seen) and source.stat().st_ctime_ns == seen.st_ctime_ns
    except OSError:
        good = False
    if good:
        os.utime(copy, ns=(time.time_ns(), seen.st_mtime_ns))  # Python compares it
    else:
        link.unlink(missing_ok=True)


def _is_bytecode_of(compiled: Path, source: os.stat_result) -> bool:
    """Whether Python would take the bytecode for that source (PEP 552: compared by time and size),
    and nothing has changed the source since, whatever its time says. What another user may write
    is never ours to execute."""
    with open(compiled, "rb") as file:
        header = file.read(16)
        status = os.fstat(file.fileno())
    words = (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return (
        header == MAGIC_NUMBER + struct.pack("<3I", *words)
        and status.st_mtime_ns > source.st_ctime_ns
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o002
    )


def _repository(project: Path, package: Path) -> Path | None:
    """The git repository that `project` lies in; None where there is none, or it is trainkit's
    own checkout."""
    top = git_answer(project, "rev-parse", "--show-toplevel")
    if not top:
        return None
    path = Path(top[:-1])
    return None if (path / package.name).resolve() == package.resolve() else path


def _project_files(repository: Path, root: Path) -> tuple[list[str], tuple[ExcludedFile, ...]]:
    """(names, what is left out) of a repository's tracked files, those of submodules too, and of
    files that are new and not ignored."""
    words = ("ls-files", "-z")
    tracked = git_answer(repository, *words, "--cached", "--recurse-submodules", timeout=120)
    new = git_answer(repository, *words, "--others", "--exclude-standard", timeout=120)
    if tracked is None or new is None:
        raise ConfigError(
            f"git cannot list the files of {repository}", hint=f"git -C {repository} status"
        )
    listed = sorted({name for name in (tracked + new).split("\0") if name})
    own = tuple(f"{os.path.relpath(root / name, repository)}/" for name in OWN)
    names = []
    left_out = []
    total = 0
    for name in listed:
        if name.startswith(own) or "__pycache__" in name.split("/"):
            continue
        path = repository / name
        size = 0
        why = ""
        if path.is_file():
            size = path.stat().st_size
            if size > LARGEST:
                why = f"over {LARGEST // 2**20} MB"
            elif total + size > WHOLE:
                why = f"all files together are over {WHOLE // 2**20} MB"
        elif path.is_symlink():
            why = "a link that leads to no file"
        elif path.is_dir():
            why = "a repository in the repository that is not a submodule"
        else:
            continue  # tracked, and deleted
        if why:
            left_out.append(ExcludedFile(name, size, why))
        else:
            names.append(name)
            total += size
    return names, tuple(left_out)


def link_code(snapshot: Path, link: Path) -> None:
    """Make the run's `code` link, or have it lead elsewhere; relative: nodes may mount the root
    elsewhere."""
    temporary = temporary_name(link)
    temporary.symlink_to(os.path.relpath(snapshot, link.parent))
    os.replace(temporary, link)
