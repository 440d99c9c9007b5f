"""Linux namespaces of nodes: one network each, joined by a bridge, without a trace in the
machine's own network."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NEWNET = 0x40000000  # linux/sched.h
# what a test starts ends with the thread that started it, and so with a test that is killed
END = ["setpriv", "--pdeathsig=KILL"]


def in_network_of(pid: int, make: Callable[[], T]) -> T:
    """What `make` makes in the network namespace of a process: a socket stays there for ever.
    (A thread of its own enters it, and ends.)"""
    made: list[T] = []
    problems: list[OSError] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(f"/proc/{pid}/ns/net") as network:
                if libc.setns(network.fileno(), NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return made[0]


class Host:
    """A network and host name of its own, kept by a process that only sleeps."""

    def __init__(self, name: str) -> None:
        self.name = name
        script = 'hostname "$1" && ip link set lo up && echo up && exec sleep infinity'
        self._process = subprocess.Popen(
            [*END, "unshare", "--net", "--uts", "sh", "-c", script, "sh", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None and errors is not None
        with out, errors:
            if out.readline() != "up\n":
                text = errors.read().strip()
                self._process.wait()
                raise OSError(f"no namespaces for {name}: {text}")
        self.pid = self._process.pid
        self.network = os.readlink(f"/proc/{self.pid}/ns/net")

    def run(self, *argv: str) -> None:
        """Run a command in its network."""
        words = ["nsenter", "-t", str(self.pid), "-n", *argv]
        subprocess.run(words, check=True, capture_output=True, text=True)

    def processes(self) -> Iterator[int]:
        """Pids of what runs in its network besides its keeper; zombies left out."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                if os.readlink(entry / "ns/net") != self.network:
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended
            if state != "Z":
                yield int(entry.name)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Network:
    """Hosts on one bridge; the first is the head, where the bridge is."""

    def __init__(self, prefix: str = "10.78.0") -> None:
        self._prefix = prefix
        self.head = Host("head")
        self.hosts: dict[str, Host] = {}
        self.head.run(
            "sh",
            "-c",
            "ip link add br0 type bridge && ip link set br0 up"
            f" && ip addr add {prefix}.1/24 dev br0",
        )
        self.address = f"{prefix}.1"

    def add(self, name: str) -> str:
        """A new host; its address."""
        host = self.hosts[name] = Host(name)
        number = len(self.hosts)
        address, port = f"{self._prefix}.{number + 10}", f"port{number}"
        make = f"ip link add {port} type veth peer name eth0 netns {host.pid}"
        self.head.run("sh", "-c", f"{make} && ip link set {port} master br0 up")
        host.run("sh", "-c", f"ip link set eth0 up && ip addr add {address}/24 dev eth0")
        return address

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        self.hosts[name].run("ip", "link", "set", "eth0", "down")

    def heal(self, name: str) -> None:
        self.hosts[name].run("ip", "link", "set", "eth0", "up")

    def close(self) -> None:
        for host in (*self.hosts.values(), self.head):
            host.close()
