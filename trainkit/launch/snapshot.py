"""The code a run executes: a copy of the trainkit package with its built extension, named by its content.

Editing the checkout changes nothing in a run that has started, and a resumed run has the code it began with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.base.files import publish_folder, sha256_tree, temporary_name, write_text

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
    target = code / digest
    if (target / "complete").is_file():
        return digest, target
    code.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    shutil.rmtree(temporary, ignore_errors=True)
    for name in names:
        copy = temporary / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.parent / name, copy)
    write_text(temporary / "complete", digest + "\n")
    try:
        publish_folder(temporary, target)
    except OSError:
        if not (target / "complete").is_file():
            raise
        shutil.rmtree(temporary)  # another run published the same content first
    return digest, target


def link_code(snapshot: Path, link: Path) -> None:
    """Make the run's `code` link, relative so that the root may be moved."""
    link.symlink_to(os.path.relpath(snapshot, link.parent))
