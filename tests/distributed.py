"""Run a function on several ranks, or in one process of its own: real processes, a free port, a
timeout, and the children's tracebacks in the failure."""

from __future__ import annotations

import collections
import faulthandler
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forkserver

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_kept: collections.deque[socket.socket] = collections.deque(maxlen=64)


def kept_port() -> int:
    """A port that nobody else is given until torch's store listens on it, however late.

    A socket that is bound, does not listen and allows others (SO_REUSEADDR, as the store's does)
    keeps its port from all who ask for any: socket(7).
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    _kept.append(keeper)  # the last worlds': former ones listen, or are over
    return int(keeper.getsockname()[1])


def rank_environments(world_size: int) -> list[dict[str, str]]:
    """torch's variables for every rank of a world on this machine, one thread each."""
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(kept_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return [{**os.environ, **shared, **meeting, **ranks} for ranks in own]


def finish(children: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int]:
    """Wait for all to end and return their exit codes. What still runs after `timeout` seconds,
    or after a failed peer's last words, is killed."""
    deadline = time.monotonic() + timeout
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() not in (None, 0) for child in children):
            deadline = min(deadline, time.monotonic() + 60)
        time.sleep(0.02)
    for child in children:
        if child.poll() is None:
            child.kill()
    return [child.wait() for child in children]


def run_ranks(world_size: int, target: str, *args: Any, timeout: float = 900) -> list[Any]:
    """Call "module:function" with `args` on every rank of a new world; returns their results in
    rank order.

    Raises AssertionError with every rank's output if one fails or is not done after `timeout`
    seconds.
    """
    return _called(rank_environments(world_size), target, args, ROOT, timeout)


def call(target: str, *args: Any, timeout: float = 900) -> Any:
    """Call "module:function" with `args` in one process in this folder. What it starts of this
    interpreter is forked too: see tests.forkserver."""
    return _called([{**os.environ, "RANK": "0"}], target, args, Path.cwd(), timeout)[0]


def _called(
    environments: Sequence[dict[str, str]],
    target: str,
    args: Sequence[Any],
    cwd: Path,
    timeout: float,
) -> list[Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        (folder / "call").write_bytes(pickle.dumps((target, args)))
        for rank, environment in enumerate(environments):
            with open(folder / f"{rank}.log", "wb") as log:
                argv = [sys.executable, "-m", "tests.distributed", str(folder)]
                environment["PYTHONPATH"] = os.pathsep.join(
                    [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
                )
                children.append(
                    forkserver.Popen(
                        argv, env=environment, cwd=cwd, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        codes = finish(children, timeout)
        if any(codes):
            logs = [
                f"--- process {rank}, exit {code}\n{(folder / f'{rank}.log').read_text()}"
                for rank, code in enumerate(codes)
            ]
            raise AssertionError(f"{target} in {len(codes)} processes failed:\n" + "\n".join(logs))
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(len(codes))
        ]


def _child(folder: Path) -> None:
    faulthandler.enable()  # where it was, should it abort
    target, args = pickle.loads((folder / "call").read_bytes())
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(*args)
    (folder / f"{os.environ['RANK']}.result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort a finalizing interpreter


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
