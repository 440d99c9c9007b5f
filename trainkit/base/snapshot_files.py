"""What a code snapshot holds: one rule for who takes it, on the head, and for the agents, which
check that theirs is the same."""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.base.files import read_json, sha256_tree

COMPLETE_FILE = "complete"  # the file that makes a folder a snapshot; it holds the hash
# lists the files, and says where they came from: no part of the content
ORIGIN_FILE = "origin.json"
COPIED = (".py", ".so", ".pyi", ".typed", ".toml", ".json")


def package_files(package: Path) -> list[str]:
    """Relative names of a package's files that a run needs, "trainkit/..."."""
    found = []
    for where, folders, files in os.walk(package):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        folder = os.path.relpath(where, package.parent)
        for name in files:  # an editor's lock may be a link that leads nowhere
            if name.endswith(COPIED) and os.path.isfile(os.path.join(where, name)):
                found.append(f"{folder}/{name}")
    return sorted(found)


def snapshot_files(root: Path) -> list[str]:
    """Relative names of a snapshot's files, as they were listed when it was taken: what programs
    write beside them later is none of it.

    Raises OSError or ValueError where the list cannot be read.
    """
    names = read_json(root / ORIGIN_FILE)["files"]
    return [str(name) for name in names]


def snapshot_hash(root: Path) -> str:
    """The hash of the code below `root` as it is now: of a snapshot everything, of a checkout
    (no snapshot) the trainkit package.

    Raises OSError or ValueError, as for a file that is missing.
    """
    whole = (root / COMPLETE_FILE).is_file()
    return sha256_tree(root, snapshot_files(root) if whole else package_files(root / "trainkit"))
