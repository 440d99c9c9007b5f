"""Small image files for tests: bytes behind the superblock of a squashfs, and real ones."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest


def pretend_squashfs(path: Path, size: int = 200_000, seed: int = 0) -> Path:
    """A file that looks whole from outside: the superblock of squashfs 4.0, then other bytes."""
    head = struct.pack("<4s4I6H2Q", b"hsqs", 1, seed, 131072, 0, 6, 17, 0, 1, 4, 0, 0, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((head + os.urandom(size))[:size])
    return path


def real_squashfs(path: Path, *options: str) -> Path:
    """A .sqsh of one file, by mksquashfs; the test is skipped without it."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("needs squashfs-tools")
    source = path.parent / f"{path.name}.files"
    source.mkdir(parents=True)
    (source / "hello").write_text("hello\n" * 1000)
    (source / "noise").write_bytes(os.urandom(50_000))
    argv = ["mksquashfs", str(source), str(path), "-noappend", "-no-progress", "-quiet", *options]
    subprocess.run(argv, check=True, capture_output=True)
    return path
