"""The tasks that show runs in a browser: tensorboard, board."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping

from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.wrapper import TaskContext
from trainkit.reports.board import Board, serve
from trainkit.runs.find import find_run


def tensorboard(task: TaskContext, run_name: str, port: int) -> None:
    """The task `tensorboard`: this process becomes TensorBoard.

    Args:
        task: how it was called.
        run_name: only this run; "": all.
        port: where it listens, on 127.0.0.1.
    """
    roots = load_jobs(task).roots()
    if run_name:
        logs = ["--logdir", str(find_run(roots, run_name).tensorboard)]
    elif len(roots) == 1:
        logs = ["--logdir", str(roots[0] / "runs")]
    else:
        logs = ["--logdir_spec", ",".join(f"{root.name}:{root / 'runs'}" for root in roots)]
    program = [sys.executable, "-m", "tensorboard.main"]
    argv = [*program, *logs, "--port", str(port), "--host", "127.0.0.1"]
    if task.dry_run:
        task.say(" ".join(argv))
    if task.dry_run or os.environ.get("SSH_CONNECTION"):
        task.say(f"from your own machine: {shlex.join(tunnel_command(os.environ, port))}")
        task.say(f"  and there in a browser: http://127.0.0.1:{port}")
    if task.dry_run:
        return
    os.execv(sys.executable, argv)


def tunnel_command(environment: Mapping[str, str], port: int) -> list[str]:
    """The ssh command that makes a port of this machine available on a person's own machine.

    This machine's address is the one that was logged in to (SSH_CONNECTION: the client's address
    and port, then ours; ssh(1)), else its name.
    """
    command = ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}"]
    host = socket.getfqdn()
    connection = environment.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        host = connection[2]
        if connection[3] != "22":
            command += ["-p", connection[3]]
    user = environment.get("USER") or environment.get("LOGNAME")
    if user:
        host = f"{user}@{host}"
    return [*command, host]


def board(task: TaskContext, port: int) -> None:
    """The task `board`: answers until Ctrl-C.

    Args:
        task: how it was called.
        port: where it listens, on this machine alone; 0: any that is free.

    Raises:
        ConfigError: the port is in use.
    """
    token = secrets.token_urlsafe(18)
    with serve(Board(load_jobs(task).roots(), token), port) as server:
        chosen = server.server_port
        task.say(f"all runs: http://127.0.0.1:{chosen}/{token}/")
        task.say(f"from your own machine: {shlex.join(tunnel_command(os.environ, chosen))}")
        task.say("  and there in a browser the same address; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
