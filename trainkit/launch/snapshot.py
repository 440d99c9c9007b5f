"""The code a run executes: a copy of the trainkit package with its built extension, named by its content.

Editing the checkout changes nothing in a run that has started, and a resumed run has the code it began with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.base.files import atomic_open, publish_folder, sha256_tree, temporary_name, write_text

COMPLETE = "complete"  # the file that makes a folder a snapshot
COPIED = (".py", ".so", ".pyi", ".typed")


def package_files(package: Path) -> list[str]:
    """Relative names of the package's files that a run needs, "trainkit/..."."""
    root = package.parent
    return sorted(str(p.relative_to(root)) for p in package.rglob("*") if p.name.endswith(COPIED) and "__pycache__" not in p.parts and p.is_file())


def take_snapshot(package: Path, code: Path) -> tuple[str, Path]:
    """Copy the package below <root>/code/<sha256> unless that very content is there.

    Args:
        package: the folder of the trainkit package.
        code: <root>/code.

    Returns:
        (sha256, the snapshot's folder).
    """
    names = package_files(package)
    digest = sha256_tree(package.parent, names)
    if (code / digest / COMPLETE).is_file():
        return digest, code / digest
    code.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(code / "new")
    for name in names:
        with atomic_open(temporary / name) as copy:
            copy.write((package.parent / name).read_bytes())
    digest = sha256_tree(temporary, names)  # of what was copied: a file may have been edited meanwhile
    write_text(temporary / COMPLETE, digest + "\n")
    target = code / digest
    try:
        publish_folder(temporary, target)
    except OSError:
        if not (target / COMPLETE).is_file():
            raise
        shutil.rmtree(temporary)  # another run published the same content first
    return digest, target


def link_code(snapshot: Path, link: Path) -> None:
    """Make the run's `code` link, relative: nodes may mount the root elsewhere."""
    link.symlink_to(os.path.relpath(snapshot, link.parent))
