"""Sums of files: XXH128, which is faster than a disk."""

from __future__ import annotations

from pathlib import Path

import xxhash

BLOCK = 2**23


def file_sum(path: Path, start: int = 0, size: int | None = None) -> str:
    """Hex XXH128 of a range of a file; of fewer bytes where it ends before."""
    digest = xxhash.xxh128()
    left = path.stat().st_size - start if size is None else size
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (block := file.read(min(BLOCK, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def identity_of(path: Path) -> tuple[str, int, int]:
    """(path, size, mtime in ns). OSError where there is no file."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns
