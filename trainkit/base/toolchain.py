"""What compilers of kernels need of a machine, and nobody misses before the first launch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def triton_objection() -> str:
    """Why Triton cannot launch a kernel here, with the way out; "" where it can. It compiles a
    small extension of Python for the driver and for each kind of launch (triton/runtime/build.py),
    by CC, gcc or clang."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    missing = []
    if not any(map(shutil.which, compilers)):
        missing.append(f"no C compiler is here (looked for {', '.join(compilers)})")
    if not header.is_file():
        missing.append(f"there is no {header}")
    if not missing:
        return ""
    return (
        f"Triton compiles at the first launch of a kernel, and {' and '.join(missing)}: apt-get"
        " install gcc python3-dev, or dnf install gcc python3-devel"
    )
