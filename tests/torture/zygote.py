"""Ranks that start in a tenth of a second: a process that has imported everything forks them.
Reads {"run", "ranks", "faults"} a line on stdin, answers {"pids"} at once and {"codes"} when all
have ended; when one ends badly the others have a second to follow. It never has threads, so
forking is safe."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.pipelining  # noqa: F401  with the trainer, all that a rank imports

from tests.distributed import rank_environments
from tests.torture import faults
from trainkit.runs.folder import RunFolder
from trainkit.train import (
    main,
    trainer as loop,  # noqa: F401
)

GRACE = 1.0


def _child(
    run: RunFolder, rank: int, leader: int, environment: dict[str, str], order: dict[str, Any]
) -> None:
    os.setpgid(0, leader)
    attempt = run.attempt(1)
    handle = os.open(attempt.log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    os.environ |= {
        "TORCHELASTIC_ERROR_FILE": str(attempt.error(rank)),
        "TRAINKIT_HEARTBEAT_FILE": str(attempt.heartbeat(rank)),
        **order["environment"],
    }
    faults.install(order["faults"], rank)
    main.leave(main.run_rank(run.path))


def _start(order: dict[str, Any]) -> list[int]:
    run = RunFolder(Path(order["run"]))
    pids: list[int] = []
    run.attempt(1).log(0).parent.mkdir(parents=True, exist_ok=True)
    for rank, environment in enumerate(rank_environments(order["ranks"])):
        leader = pids[0] if pids else 0
        pid = os.fork()
        if pid == 0:
            try:
                _child(run, rank, leader, environment, order)
            finally:
                os._exit(99)
        pids.append(pid)
        os.setpgid(pid, leader)
    return pids


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] not in (0, 12):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for pid in (pid for pid in pids if pid not in codes):
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    for line in sys.stdin:
        started = _start(json.loads(line))
        print(json.dumps({"pids": started}), flush=True)
        print(json.dumps({"codes": _wait(started)}), flush=True)
