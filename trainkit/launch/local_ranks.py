"""A few ranks on this machine that do one task and end: a model that does not fit on one device is
sharded over them. They are not a run and leave no record."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import (
    cpu_sharing,
    is_running,
    on_this_node,
    reap_child,
    start_child,
    stop_children,
)
from trainkit.base.worker import (
    PARENT_VARIABLE,
    error_from_report,
    how_it_ended,
    said_by_worker,
)
from trainkit.launch.launchers.transports import read_new_lines
from trainkit.launch.supervise.rank_environment import port_candidates

POLL_SECONDS = 0.05
# how long peers of a failed rank have to say what they saw: theirs may be the true reason
ECHO_SECONDS = 0.5
GRACE_SECONDS = 3.0
OnProgress = Callable[[int, int], None]
_Line = dict[str, Any]  # trainkit.base.worker says what a rank writes


def run_local_ranks(
    argv: Sequence[str],
    spec: Mapping[str, object],
    ranks: int,
    device_type: str,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Run a program as so many ranks of this machine and return rank 0's result. Each is a
    worker (see base.worker) with torch's variables.

    Args:
        argv: the program; the path of the spec's JSON file is appended.
        spec: written for all ranks.
        ranks: how many.
        device_type: "cpu": they share this machine's cores.
        on_progress: called with rank 0's progress: (done, total).

    Raises:
        TrainkitError: what a rank raised; exit 10, one ended by a signal. No process is left
            behind, not on Ctrl-C either.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as name:
        folder = Path(name)
        write_json(folder / "spec.json", dict(spec))
        processes = _LocalRanks(folder, argv, ranks, _environment(ranks, device_type, folder))
        try:
            while processes.wait():
                for line in processes.read_new(0):
                    if "progress" in line:
                        on_progress(line["progress"], line["total"])
            return processes.result()
        finally:
            stop_children(processes.children, GRACE_SECONDS)


def _free_port(seed: str, address: str) -> int:
    """A port of this machine that nobody listens on, below those that the kernel gives to
    outgoing connections."""
    for port in port_candidates(seed):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return port
    raise TrainkitError(f"none of the ports tried on {address} is free", exit=Exit.START)


def _environment(ranks: int, device_type: str, folder: Path) -> dict[str, str]:
    """What all ranks have of torch's variables (PyTorch documentation, "torchrun")."""
    sharing = on_this_node(cpu_sharing(ranks, os.environ)) if device_type == "cpu" else {}
    address = "127.0.0.1"
    meeting = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(_free_port(str(folder), address)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    sizes = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    return {**os.environ, **sharing, **meeting, **sizes, PARENT_VARIABLE: str(os.getpid())}


class _LocalRanks:
    """The processes, and what they have written."""

    def __init__(
        self, folder: Path, argv: Sequence[str], ranks: int, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.children = list[subprocess.Popen[bytes]]()
        self.lines: list[list[_Line]] = [[] for _ in range(ranks)]
        self.read = [0] * ranks  # bytes of each rank's output that were heard
        self.failed_at: float | None = None
        for rank in range(ranks):
            with open(self._output(rank), "wb") as output, open(self._log(rank), "wb") as log:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.children.append(
                    start_child(
                        [*argv, str(folder / "spec.json")],
                        env={**environment, **own},
                        cwd=folder,
                        stdout=output,
                        stderr=log,
                    )
                )

    def _output(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def _log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def read_new(self, rank: int) -> Sequence[_Line]:
        """Lines that a rank has written since the last call."""
        whole = read_new_lines(self._output(rank), self.read[rank])
        self.read[rank] += len(whole)
        new = said_by_worker(whole)
        self.lines[rank] += new
        return new

    def wait(self) -> bool:
        """Wait a moment; returns whether any goes on that should."""
        time.sleep(POLL_SECONDS)
        going = [child for child in self.children if is_running(child)]
        if self.failed_at is None and any(
            not is_running(child) and _code(child) for child in self.children
        ):
            self.failed_at = time.monotonic()
        return bool(going) and (
            self.failed_at is None or time.monotonic() < self.failed_at + ECHO_SECONDS
        )

    def result(self) -> dict[str, Any]:
        """Rank 0's result.

        Raises:
            TrainkitError: the error of the first rank that wrote one, else how one ended.
        """
        ended = [0 if is_running(child) else reap_child(child) for child in self.children]
        for rank in range(len(ended)):
            self.read_new(rank)
        if not any(ended):
            return dict(next(line["result"] for line in self.lines[0] if "result" in line))
        for lines in self.lines:
            for line in lines:
                if "error" in line:
                    raise error_from_report(line["error"])
        # one ended by a signal makes its peers fail
        code = min(ended) if min(ended) < 0 else max(ended)
        raise self._failure(ended.index(code), code)

    def _failure(self, rank: int, code: int) -> TrainkitError:
        last = self._log(rank).read_text(errors="replace").splitlines()[-8:]
        return TrainkitError(
            f"rank {rank} of {len(self.children)} {how_it_ended(code)}",
            exit=Exit.RANK_INFRA if code < 0 else Exit.RANK_USER,
            hint="\n  ".join(last),
        )


def _code(child: subprocess.Popen[bytes]) -> int:
    """The exit code of an ended child, which stays to be reaped; anything but 0 for a signal."""
    if child.returncode is None:
        info = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    else:
        info = None
    return (child.returncode or 0) if info is None else info.si_status
