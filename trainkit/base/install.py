"""Installs this checkout into an environment (first form; being written)."""

import hashlib
from pathlib import Path


def csrc_sha256(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in (root / "csrc").rglob("*") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
