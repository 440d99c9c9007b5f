"""An image file that is really entered: this machine's own /usr and Python in an empty one, by the
stand-in for enroot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.images.enroot_stand_in import install

FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "run", "var", "root")
LINKS = ("bin", "sbin", "lib", "lib64")
PROGRAMS = ("mksquashfs", "unsquashfs", "bwrap", "unshare")
MARK = "/etc/in-the-image"  # a file that only the image has


@dataclass(frozen=True)
class EnteredImage:
    """An image, and where the program `enroot` is.

    Args:
        file: the .sqsh.
        programs: for PATH.
    """

    file: Path
    programs: Path

    @property
    def prolog(self) -> str:
        """The cluster's, as TOML: what leads to the runtime."""
        state = self.programs.parent
        return json.dumps(
            [
                f"export PATH={self.programs}:$PATH",
                f"export ENROOT_RUNTIME_PATH={state}/run ENROOT_DATA_PATH={state}/data",
                f"mkdir -p {state}/run {state}/data",
            ]
        )

    def table(self, **more: object) -> str:
        """Lines of [containers.X]."""
        places = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix])
        mounts = [
            f"{place}:{place}:ro"
            for place in places
            if place == "/usr" or not place.startswith("/usr/")
        ]
        values = {
            "image": str(self.file),
            "runtime": "enroot",
            "python": sys.executable,
            "mounts": mounts,
            "stages_in_container": True,
            **more,
        }
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def entered_image(folder: Path, fill: Callable[[Path], object] = lambda root: None) -> EnteredImage:
    """Make one; skips where it cannot be entered.

    Args:
        folder: where it is made.
        fill: puts more into its root.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs root, and {', '.join(missing or PROGRAMS)}")
    root = folder / "root"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in LINKS:
        (root / name).symlink_to(f"usr/{name}")
    (root / MARK.lstrip("/")).write_text("")
    fill(root)
    file = folder / "box.sqsh"
    argv = ["mksquashfs", str(root), str(file), "-comp", "lz4", "-no-progress", "-quiet"]
    subprocess.run(argv, check=True, capture_output=True)
    return EnteredImage(file, install(folder / "bin"))
