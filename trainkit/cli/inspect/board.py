"""The task `board`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex

from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.tensorboard import tunnel_command
from trainkit.cli.wrapper import TaskContext
from trainkit.reports.board import Board, serve


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
