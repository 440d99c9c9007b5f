"""What tests have mounted."""

from __future__ import annotations

import subprocess
from pathlib import Path


def unmount(folder: Path) -> None:
    """Take away every mount below a folder, the last first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for place in reversed([line.split()[4] for line in lines]):
        if Path(place).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
