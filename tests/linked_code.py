"""Snapshots of the code whose files are links to one copy a test run.

Every run of a test has a root, and so a snapshot, of its own: 466 files, written and synced in
0.25 s of a processor. Here they are hard links, and bytecode is shared. Who changes a file of a
snapshot must put another in its place (`Path.unlink`, then write). Tests of the snapshot itself,
of other packages, of projects with a repository, and roots on another file system take real ones.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import cache_from_source
from pathlib import Path

import trainkit
from trainkit.base.files import sha256_files, sha256_tree
from trainkit.base.snapshot_files import package_files
from trainkit.launch.supervise import code_snapshot

PACKAGE = Path(trainkit.__file__).parent


def link_snapshots(shared: Path) -> None:
    """From now on snapshots that this process and its forks take are linked to a copy of the
    package in the folder `shared`."""
    names = package_files(PACKAGE)
    for name in names:
        source, target = PACKAGE.parent / name, shared / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)  # with its time, by which bytecode is known
        bytecode = Path(cache_from_source(str(source)))
        (target.parent / "__pycache__").mkdir(exist_ok=True)
        if source.suffix == ".py" and bytecode.exists():
            shutil.copy2(bytecode, cache_from_source(str(target)))
    package = {name: PACKAGE.parent / name for name in names}
    digest, known = sha256_tree(shared, names), _times(shared, names)
    assert digest == sha256_files(package) and known == _times(PACKAGE.parent, names)
    copied = code_snapshot._copied

    def linked(sources: dict[str, Path], folder: Path) -> str:
        if sources != package:
            return copied(sources, folder)
        try:
            _link(shared, folder, names)
        except OSError:  # another file system, or another user
            shutil.rmtree(folder, ignore_errors=True)
            return copied(sources, folder)
        if not _times(shared, names) == known == _times(PACKAGE.parent, names):
            now = {sha256_tree(shared, names), sha256_files(package)}
            assert now == {digest}, f"a test changed {shared}, or you {PACKAGE}"
        return digest

    code_snapshot._copied = linked


def _times(root: Path, names: list[str]) -> list[tuple[int, int]]:
    """By which a file that was written to is known: reading all of them takes ten times as long."""
    found = [os.stat(root / name) for name in names]
    return [(status.st_size, status.st_mtime_ns) for status in found]


def _link(shared: Path, folder: Path, names: list[str]) -> None:
    for parent in sorted({os.path.dirname(name) for name in names}):
        (folder / parent).mkdir(parents=True, exist_ok=True)
        (folder / parent / "__pycache__").symlink_to(shared / parent / "__pycache__")
    for name in names:
        os.link(shared / name, folder / name)
