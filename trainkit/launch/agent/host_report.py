"""What an agent says of its host before anything is started: cheap facts, each for itself, so
that one that fails hides no other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from trainkit.base import slots
from trainkit.base.address import local_address_in, local_addresses
from trainkit.base.errors import TrainkitError
from trainkit.base.process import identity
from trainkit.base.snapshot_files import snapshot_hash
from trainkit.launch.protocol.frames import Frame

NVIDIA = Path("/proc/driver/nvidia")


def hello(
    session: Mapping[str, Any], folder: Path, node: int, local_address: str, code: Path
) -> Frame:
    """The "hello" frame.

    Args:
        session: the form session/1. folder: where it was read from. local_address: this host's
        end of the connection to the supervisor, for where no interface is asked for. code: the
        root of the code that runs here.
    """
    errors: dict[str, str] = {}

    def fact(name: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except (OSError, ValueError, KeyError, TypeError, TrainkitError) as error:
            errors[name] = str(error)
            return None

    wanted = session.get("interface")
    if wanted:
        address = fact("address", lambda: local_address_in(wanted))
    else:
        address = local_address
    facts = {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "identity": identity().to_json(),
        "address": address or local_address,
        "address_error": errors.get("address"),
        "interface": fact(
            "interface",
            lambda: {a: name for name, a in local_addresses()}.get(address or local_address),
        ),
        "versions": {
            "python": platform.python_version(),
            "torch": fact("torch", lambda: version_of("torch", session.get("python_paths") or ())),
            "kernel": os.uname().release,
            "driver": fact("driver", driver_version),
        },
        "executable": sys.executable,
        "snapshot": fact("snapshot", lambda: snapshot_hash(code)),
        "extension": fact("extension", lambda: extension_error(code / "trainkit")),
        "nonce": session.get("nonce"),
        "writable": _write_error(folder, node),
        "gpus": fact("gpus", gpus) or [],
        "cpus": fact("cpus", lambda: len(os.sched_getaffinity(0))),
        "disk_free": fact("disk_free", lambda: free_bytes(session["root"])),
        # NCCL's and the data loader's
        "shared_memory": fact("shared_memory", lambda: free_bytes("/dev/shm")),
        # the hard limits: ranks raise their own; -1: none
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        "slots": fact("slots", lambda: slots.slot_holders(Path(session["node_folder"]))) or {},
    }
    return {"type": "hello", "node": node, **facts, "errors": errors, "clock": time.time()}


def version_of(package: str, further: tuple[str, ...] | list[str] = ()) -> str | None:
    """The version of a package that `python -I` would import here, from its version.py or its
    metadata; None where it is not installed.

    This process has no site-packages on its path (`-S`), and importing torch takes seconds.
    """
    for folder in (*map(Path, further), *_site_folders()):
        with contextlib.suppress(OSError):
            if match := re.search(
                r"^__version__\s*=\s*['\"]([^'\"]+)",
                (folder / package / "version.py").read_text(),
                re.MULTILINE,
            ):
                return match[1]
        for metadata in folder.glob(f"{package}-*.dist-info"):
            return metadata.name.removesuffix(".dist-info").partition("-")[2]
    return None


def extension_error(package: Path) -> str | None:
    """Why this Python cannot load the compiled part of a package; None where it can, or there is
    none.

    It is loaded, not imported: the dynamic linker says what the processor, the C library or its
    version do not have, and numpy is not needed.
    """
    built = sorted(path.name for path in package.glob("_index.*.so"))
    fitting = [name for name in built if name.removeprefix("_index") in EXTENSION_SUFFIXES]
    if built and not fitting:
        return (
            f"{', '.join(built)} is for another Python than {platform.python_version()}, which"
            f" loads _index{EXTENSION_SUFFIXES[0]}"
        )
    for name in fitting:
        try:
            ctypes.CDLL(str(package / name))
        except OSError as error:
            return str(error)
    return None


def _site_folders() -> Iterator[Path]:
    """Where this interpreter's packages are, the virtual environment's first."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # of a virtual environment's bin/python, a link that must not be followed
    here = Path(sys.executable).parent.parent
    settings = ""
    with contextlib.suppress(OSError):
        settings = (here / "pyvenv.cfg").read_text().lower()
    if settings and not re.search(r"include-system-site-packages\s*=\s*true", settings):
        prefixes = [here]
    else:
        prefixes = [here, Path(sys.base_prefix)]
    for prefix in dict.fromkeys(prefixes):
        for inner in (
            f"lib64/{name}/site-packages",
            f"lib/{name}/site-packages",
            f"local/lib/{name}/dist-packages",
            "lib/python3/dist-packages",
        ):
            if (prefix / inner).is_dir():
                yield prefix / inner


def gpus(devices: Path = Path("/dev"), driver: Path = NVIDIA) -> list[str]:
    """Names of the GPUs whose device files are here, by their numbers; NVIDIA's driver says them
    in /proc, without nvidia-smi's second."""
    present = {
        int(p.name.removeprefix("nvidia"))
        for p in devices.glob("nvidia[0-9]*")
        if p.name.removeprefix("nvidia").isdigit()
    }
    names = {}
    for about in driver.glob("gpus/*/information"):
        said = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", about.read_text(), re.MULTILINE))
        if said.get("Device Minor", "").isdigit():
            names[int(said["Device Minor"])] = said.get("Model", "")
    return [names.get(number) or f"nvidia{number}" for number in sorted(present)]


def driver_version(driver: Path = NVIDIA) -> str | None:
    """The version of NVIDIA's kernel driver; None where there is none."""
    try:
        text = (driver / "version").read_text()
    except FileNotFoundError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if match:
        return match[1]
    return None


def _write_error(folder: Path, node: int) -> str | None:
    """Why this host cannot write into the session's folder; None where it can."""
    path = folder / f"writable-{node}-{secrets.token_hex(4)}"
    try:
        path.write_bytes(b"x")
        path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return error.strerror or str(error)
    return None


def free_bytes(folder: str) -> int:
    """Room for more files of ours on the file system of a folder. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
