"""The code a run executes, named by its content: the trainkit package with its built extension
and, where the experiments lie in another git repository, that repository's tracked and
uncommitted files.

Editing the checkout changes nothing in a run that has started, and a resumed run has the code it
began with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
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
            shutil.copyfileobj(original, target, 2**20)
            target.flush()
            os.fsync(target.fileno())
            if os.access(source, os.X_OK):
                os.fchmod(target.fileno(), os.stat(target.fileno()).st_mode | 0o111)
            read = os.fstat(original.fileno())
            os.utime(target.fileno(), ns=(read.st_atime_ns, read.st_mtime_ns))
        if name.endswith(".py"):
            _link_bytecode(source, folder / name)

    with ThreadPoolExecutor(16) as pool:  # a shared file system answers slowly, but many at once
        list(pool.map(copy, sources.items()))
        list(pool.map(fsync_folder, [Path(where) for where, *_ in os.walk(folder)]))
    return sha256_tree(folder, list(sources))


def _link_bytecode(source: Path, copy: Path) -> None:
    """Give a copied module the bytecode that its source has, if that is on the same file system:
    what starts first from new code need not compile it. A link is safe, since Python replaces such
    a file and never writes into it; by the time and size of the source, which the copy keeps, it
    knows whether the bytecode is right."""
    compiled = Path(cache_from_source(source))
    with contextlib.suppress(OSError):
        status = compiled.stat()
        # Python compares whole seconds, and so misses an edit in the second of the compilation;
        # and nobody else may say what a run executes
        if status.st_mtime_ns > copy.stat().st_mtime_ns and not status.st_mode & 0o002:
            link = Path(cache_from_source(copy))
            link.parent.mkdir(exist_ok=True)
            link.hardlink_to(compiled)


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
    for name in [name for name in listed if not name.startswith(own)]:
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
