"""Prints what a Python environment has, a line `NAME<tab>VERSION` each; empty where it is missing.

Run by entrypoint.sh at each start of a container, so nothing is imported that takes seconds: the
versions stand in the packages' metadata, in torch/version.py, and in NCCL's library. Standard
library only, Python 3.8.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import runpy
import sys
from pathlib import Path


def package(name: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_folder() -> Path | None:
    """Where torch lies; it is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent


def cuda(torch: Path | None) -> str:
    """The CUDA that torch was built for, as its version.py has it."""
    if torch is None:
        return ""
    try:
        version = runpy.run_path(str(torch / "version.py")).get("cuda")
    except OSError:
        return "unknown: torch has no version.py"
    return str(version or "none: torch is built for CPUs")


def nccl(torch: Path | None) -> str:
    """The version of the NCCL that ranks load: the system's, or the one that came with torch.

    ncclGetVersion gives 10000 * major + 100 * minor + patch since 2.9 (nccl.h).
    """
    places = ["libnccl.so.2"]
    if torch is not None:
        places.append(str(torch.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"))
    for place in places:
        number = ctypes.c_int()
        try:
            ctypes.CDLL(place).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""


def main() -> None:
    """Print them."""
    torch = torch_folder()
    lines = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "trainkit": package("trainkit-lm"),
        "torch": package("torch"),
        "cuda": cuda(torch),
        "nccl": nccl(torch),
    }
    for name, version in lines.items():
        print(f"{name}\t{version}")


if __name__ == "__main__":
    main()
