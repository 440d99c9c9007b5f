"""Scripts that stand for programs."""

from __future__ import annotations

from pathlib import Path


def put_program(folder: Path, name: str, text: str) -> Path:
    """A script that can be run, in a folder that is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path
