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
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

from trainkit.base import slots
from trainkit.base.address import local_address_in, local_addresses
from trainkit.base.errors import TrainkitError
from trainkit.base.old_python import without_prefix, without_suffix
from trainkit.base.process import identity
from trainkit.base.snapshot_files import snapshot_hash
from trainkit.base.toolchain import triton_objection
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.protocol.session_document import SessionDocument

NVIDIA = Path("/proc/driver/nvidia")
T = TypeVar("T")


class _FactFinder:
    """Finds out facts each for itself.

    `errors`: why a fact could not be found out, by its name.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def find(self, name: str, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except (OSError, ValueError, KeyError, TypeError, TrainkitError) as error:
            self.errors[name] = str(error)
            return None


def host_facts(
    session: SessionDocument, folder: Path, node: int, local_address: str, proof: str
) -> HostFacts:
    """What this host says of itself.

    Args:
        session: the session's document.
        folder: where it was read from.
        node: this host's number in the session.
        local_address: this host's end of the connection to the supervisor, for where no network
            is asked for.
        proof: how this host can prove that nothing is left of a run.
    """
    finder = _FactFinder()
    find = finder.find
    devices = tuple(find("gpus", gpus) or ())
    if devices and (why := triton_objection()):
        finder.errors["triton"] = why
    network = session.interface
    found = find("address", lambda: local_address_in(network)) if network else None
    address = found or local_address
    # the root of the code that runs here
    code = Path(__file__).resolve().parents[3]
    return HostFacts(
        node=node,
        host=os.uname().nodename,
        pid=os.getpid(),
        identity=identity().to_json(),
        address=address,
        address_error=finder.errors.get("address"),
        interface=find(
            "interface", lambda: {a: name for name, a in local_addresses()}.get(address)
        ),
        versions={
            "python": platform.python_version(),
            "torch": find("torch", lambda: version_of("torch")),
            "kernel": os.uname().release,
            "driver": find("driver", driver_version),
        },
        executable=sys.executable,
        snapshot=find("snapshot", lambda: snapshot_hash(code)),
        extension=find("extension", lambda: extension_error(code / "trainkit")),
        nonce=session.nonce,
        writable=_write_error(folder, node),
        gpus=devices,
        cpus=find("cpus", lambda: len(os.sched_getaffinity(0))),
        disk_free=find("disk_free", lambda: free_bytes(session.root)),
        # NCCL's and the data loader's
        shared_memory=find("shared_memory", lambda: free_bytes("/dev/shm")),
        # the hard limits: ranks raise their own; -1: none
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        slots=find("slots", lambda: slots.slot_holders(Path(session.node_folder))) or {},
        errors=finder.errors,
        clock=time.time(),
        proof=proof,
    )


def version_of(package: str) -> str | None:
    """The version of a package that `python -I` would import here, from its version.py or its
    metadata; None where it is not installed.

    This process has no site-packages on its path (`-S`), and importing torch takes seconds.
    """
    for folder in _site_folders():
        with contextlib.suppress(OSError):
            if match := re.search(
                r"^__version__\s*=\s*['\"]([^'\"]+)",
                (folder / package / "version.py").read_text(),
                re.MULTILINE,
            ):
                return match[1]
        for metadata in folder.glob(f"{package}-*.dist-info"):
            return without_suffix(metadata.name, ".dist-info").partition("-")[2]
    return None


def extension_error(package: Path) -> str | None:
    """Why this Python cannot load the compiled part of a package; None where it can, or there is
    none.

    It is loaded, not imported: the dynamic linker says what the processor, the C library or its
    version do not have, and numpy is not needed.
    """
    built = sorted(path.name for path in package.glob("_index.*.so"))
    fitting = [name for name in built if without_prefix(name, "_index") in EXTENSION_SUFFIXES]
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
                yield from _linked_folders(prefix / inner)


def _linked_folders(site: Path) -> Iterator[Path]:
    """Folders that the .pth files of a folder of packages add, as Python's own `site` reads them;
    their lines of code are not run."""
    for file in sorted(site.glob("*.pth")):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text("utf-8").splitlines():
                if line.strip() and not line.startswith(("#", "import ", "import\t")):
                    folder = site / line.rstrip()
                    if folder.is_dir():
                        yield folder


def gpus(devices: Path = Path("/dev"), driver: Path = NVIDIA) -> list[str]:
    """Names of the GPUs whose device files are here, by their numbers; NVIDIA's driver says them
    in /proc, without nvidia-smi's second."""
    numbers = [without_prefix(path.name, "nvidia") for path in devices.glob("nvidia[0-9]*")]
    present = {int(number) for number in numbers if number.isdigit()}
    names = {}
    for about in driver.glob("gpus/*/information"):
        values = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", about.read_text(), re.MULTILINE))
        if values.get("Device Minor", "").isdigit():
            names[int(values["Device Minor"])] = values.get("Model", "")
    return [names.get(number) or f"nvidia{number}" for number in sorted(present)]


def driver_version(driver: Path = NVIDIA) -> str | None:
    """The version of NVIDIA's kernel driver; None where there is none."""
    try:
        text = (driver / "version").read_text()
    except FileNotFoundError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


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
