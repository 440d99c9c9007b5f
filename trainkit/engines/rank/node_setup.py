"""What an engine's own scripts set on a node before they start it: limits, ports, file systems.

Source: train_setup.sh of neuronx-nemo-megatron f4743ce, and test.sh of its branch 2.13.1_release:
`ulimit -n 65535`, `sudo sysctl -w net.ipv4.ip_local_reserved_ports=41000` and, where there is
Lustre's tool, `sudo lctl set_param 'osc.*.max_dirty_mb=64'`.
"""

from __future__ import annotations

import glob
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass

SECONDS = 20
RESERVED = "net.ipv4.ip_local_reserved_ports"
RESERVED_FILE = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")


@dataclass(frozen=True)
class NodeSetup:
    """What a node must have, or is given, before its engine starts.

    Args:
        open_files: how many files a process may have open.
        reserve_port: keep the port of rank 0 from outgoing connections.
        max_dirty_mb: of each connection to Lustre, where the node has its tool; 0: as it is.
        devices: a pattern of device files of which there must be at least one; "": none.
        mend: what a person does where there is none.
    """

    open_files: int = 0
    reserve_port: bool = False
    max_dirty_mb: int = 0
    devices: str = ""
    mend: str = ""


def device_problems(setup: NodeSetup) -> list[str]:
    """That the node has no device of the engine's."""
    if not setup.devices or glob.glob(setup.devices):
        return []
    return [f"{os.uname().nodename} has no {setup.devices}: {setup.mend}"]


def prepare_node(setup: NodeSetup, port: str) -> list[str]:
    """Set all of it; returns what could not be set, a line each. Nothing of it decides whether the
    engine can start: a limit that is too low or a port that is taken ends it with its own words.

    Args:
        setup: what to set.
        port: of rank 0.
    """
    notes = []
    if setup.open_files:
        notes.append(raise_open_files(setup.open_files))
    if setup.reserve_port:
        notes.append(reserve_port(port))
    if setup.max_dirty_mb and shutil.which("lctl"):
        notes.append(_as_root("lctl", "set_param", f"osc.*.max_dirty_mb={setup.max_dirty_mb}"))
    return [note for note in notes if note]


def raise_open_files(wanted: int) -> str:
    """The limit of open files of this process and all that it starts, exactly `wanted`; returns
    why not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted, max(hard, wanted) if enough else wanted)
        )
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return (
            f"ulimit -n {wanted}: the hard limit on {os.uname().nodename} is {hard}, and the engine"
            f" runs with that (it was {soft}); LimitNOFILE of slurmd or sshd raises it"
        )
    return ""


def reserve_port(port: str) -> str:
    """Keep a port from outgoing connections, besides those that are reserved already; returns why
    that is not so."""
    try:
        there = RESERVED_FILE.read_text().strip()
    except OSError as error:
        return f"{RESERVED_FILE} cannot be read: {error.strerror}"
    if _holds(there, int(port)):
        return ""
    ports = f"{there},{port}" if there else port
    return _as_root("sysctl", "-w", f"{RESERVED}={ports}")


def _holds(ranges: str, port: int) -> bool:
    """Whether "8080,9000-9100" has a port."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        if int(first) <= port <= int(last or first):
            return True
    return False


def _as_root(*argv: str) -> str:
    """Run a program as root, by sudo without a question; returns why it failed."""
    if os.geteuid() != 0:
        argv = ("sudo", "-n", *argv)
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(argv)}` could not be run on {os.uname().nodename}: {error}"
    if done.returncode == 0:
        return ""
    last = done.stdout.decode("utf-8", "replace").strip().splitlines()[-1:]
    return (
        f"`{' '.join(argv)}` ended with {done.returncode} on {os.uname().nodename}: {''.join(last)}"
    )
