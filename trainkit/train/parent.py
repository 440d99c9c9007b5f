"""The process from which an agent has its host's ranks forked: python -I
<snapshot>/trainkit/train/parent.py RUN_FOLDER.

It imports what they need, computes nothing (threads of OpenMP do not survive a fork, and the first
product of matrices in the child would wait for them), and then says "ready" on its stdin, a socket
of the agent's. Each message there comes with open files: what the rank is to be (JSON), a socket
to say on that it is there and to hear "go" on, its stdout and stderr, and where there is one the
entrance of its cgroup.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MOST = 8  # open files in a message
SAID = 2**20  # bytes of what the imports printed


def import_all(run_folder: Path) -> None:
    """Import what a rank of this run will."""
    from trainkit.base.process import no_garbage_collection

    # torch's compiler asks whether there is a GPU while it is imported: of the driver's library
    # that lists GPUs, or of CUDA itself, which no fork survives (torch.cuda.is_available)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with no_garbage_collection():
        import torch.utils.tensorboard

        import trainkit.train.trainer  # noqa: F401
        from trainkit.jobs.resolved import read_job
        from trainkit.runs.folder import RunFolder

        if read_job(RunFolder(run_folder).job).training.compile:
            import torch._inductor.compile_fx  # noqa: F401


def objection() -> str:
    """Why ranks cannot be forked from this process; "" where they can. A first fork is tried:
    OpenBLAS, which numpy loads, ends its threads then, and starts others when it is used."""
    import torch

    if not (pid := os.fork()):
        os._exit(int(torch.cuda._is_in_bad_fork()))
    if os.waitpid(pid, 0)[1]:
        return "importing has begun to use the GPU, which no fork survives"
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if others:
        names = ", ".join(sorted((task / "comm").read_text().strip() for task in others))
        return f"importing has started threads, which no fork survives: {names}"
    return ""


def serve(line: socket.socket, run_main: Callable[[], object]) -> None:
    """Fork what is asked for until the agent is gone."""
    from trainkit.base.old_python import receive_handles

    while handles := receive_handles(line, 64, MOST)[1]:
        sys.stdout.flush()
        if not (middle := os.fork()):
            _fork_again(line, handles, run_main)
        os.waitpid(middle, 0)
        for handle in handles:
            os.close(handle)


def _fork_again(
    line: socket.socket, handles: Sequence[int], run_main: Callable[[], object]
) -> NoReturn:
    """Fork the rank and end: so the agent, which adopts orphans, becomes its parent."""
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
        with socket.socket(fileno=handles[1]) as agent:
            try:
                with open(handles[0], "rb") as file:
                    file.seek(0)
                    become(json.load(file), middle, handles)
            except Exception as error:
                agent.send(f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            agent.send(str(os.getpid()).encode())
            if agent.recv(64) != b"go":
                os._exit(1)
        run_main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def become(rank: Mapping[str, Any], middle: int, handles: Sequence[int]) -> None:
    """Be what exec would have made of the process.

    Args:
        rank: its argv, env, cwd, mark, limit, and who its parent is to be.
        middle: our parent until it has ended.
        handles: the open files of the message.

    Raises:
        OSError: what of it failed.
        ValueError: it is another program, or has no room for its mark.
    """
    from trainkit.base.process import die_with_parent, show_as
    from trainkit.base.process_marks import MARK_VARIABLE

    program = Path(rank["argv"][2])
    if not program.samefile(Path(__file__).with_name("main.py")):
        raise ValueError(f"{program} is not the program that was imported")
    while os.getppid() == middle:
        time.sleep(0.0005)
    die_with_parent(rank["agent"])
    os.setsid()
    _, _, out, err, *entrance = handles
    for handle in entrance:
        os.write(handle, b"0")
        os.close(handle)
    if rank["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, tuple(rank["limit"]))
    os.chdir(rank["cwd"])
    said = os.pread(2, SAID, 0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.write(2, said)
    os.environ.clear()
    os.environ.update(rank["env"])
    show_as(rank["argv"], MARK_VARIABLE, rank["mark"])
    sys.argv = rank["argv"][2:]


def main() -> None:
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from trainkit.train.main import main as run_main

    parser = argparse.ArgumentParser(description="What ranks of the native engine are forked from.")
    parser.add_argument("run_folder", type=Path)
    given = parser.parse_args()
    with socket.socket(fileno=0) as line:
        try:
            import_all(given.run_folder)
            why = objection()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        line.send(why.encode()[:SAID] or b"ready")
        if not why:
            serve(line, run_main)


if __name__ == "__main__":
    main()
