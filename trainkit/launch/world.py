"""Who runs where, as one JSON file in the run folder: launch/world.json. The ranks' environment follows from it alone."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.forms import document
from trainkit.base.redact import SHORTEST
from trainkit.base.unit import PARENT_VARIABLE
from trainkit.engines.contract import Command
from trainkit.runs.folder import AttemptFolder, RunFolder

PORTS = range(20000, 32000)  # below Linux's ephemeral range, so that no outgoing connection takes one meanwhile
# What a rank has of its caller's environment. Everything else it needs is named in jobs.toml.
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Node:
    """One host and the ranks on it, in order."""

    host: str
    address: str
    node_rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Allocation:
    """Hosts in rank order, and where rank 0 listens."""

    nodes: tuple[Node, ...]
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)


def free_port(seed: str, address: str) -> int:
    """A port of `address` that nobody listens on: the first free one of a sequence that `seed` (the run and attempt) decides."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    for i in range(64):
        port = PORTS[(start + i * 7) % len(PORTS)]
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise TrainkitError(f"none of 64 ports tried on {address} is free", exit=Exit.START)


def allocate_local(command: Command, seed: str) -> Allocation:
    """This machine alone, over the loopback interface."""
    address = "127.0.0.1"
    node = Node(socket.gethostname(), address, 0, tuple(range(command.ranks_per_node)))
    return Allocation((node,), address, free_port(seed, address))


def secret_values(names: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of the named secrets.

    Raises ConfigError naming every one that must be there and is not ("NAME?" may be absent), and every one too short to be kept out of logs.
    """
    missing = [n for n in names if not n.endswith("?") and not environment.get(n)]
    short = [n for n in names if 0 < len(environment.get(n.rstrip("?"), "")) < SHORTEST]
    if short:
        raise ConfigError(f"secrets of fewer than {SHORTEST} characters cannot be kept out of logs: {', '.join(short)}")
    if missing:
        raise ConfigError(
            f"secrets not in the environment: {', '.join(missing)}", hint="export them, or write NAME? in clusters.X.secrets where one is optional"
        )
    plain = [n.rstrip("?") for n in names]
    return {n: environment[n] for n in plain if environment.get(n)}


def world_document(run: RunFolder, attempt: int, command: Command, allocation: Allocation) -> dict[str, Any]:
    """The form world/1."""
    return document(
        "world/1",
        run=run.id,
        attempt=attempt,
        world_size=allocation.world_size,
        master_addr=allocation.master_addr,
        master_port=allocation.master_port,
        nodes=[asdict(node) for node in allocation.nodes],
        command=command.to_json(),
        passed_on={name: os.environ[name] for name in PASSED_ON if name in os.environ},
    )


def rank_environment(
    world: Mapping[str, Any], node_rank: int, local_rank: int, attempt: AttemptFolder, parent_pid: int, secrets: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one rank: what is passed on, the command's, torch's variables, and where to report.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's
    (PyTorch documentation, "torchrun"), TORCHELASTIC_ERROR_FILE too. TRAINKIT_HEARTBEAT_FILE is where the rank says how far it is;
    the end of process TRAINKIT_PARENT_PID ends the rank.
    """
    node = world["nodes"][node_rank]
    rank = node["ranks"][local_rank]
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world["world_size"]),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(node["ranks"])),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(world["nodes"])),
        "MASTER_ADDR": world["master_addr"],
        "MASTER_PORT": str(world["master_port"]),
        "TORCHELASTIC_ERROR_FILE": str(attempt.error(rank)),
        "TRAINKIT_HEARTBEAT_FILE": str(attempt.heartbeat(rank)),
        PARENT_VARIABLE: str(parent_pid),
    }
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if world["master_addr"] == "127.0.0.1" else {}
    return {**world["passed_on"], **loopback, **world["command"]["env"], **secrets, **own}
