"""One task of an array: does its share of the units of a level, one after another, and stamps each
that succeeds.

`python -m trainkit.stages.array_task LEVEL.json` on a node; SLURM_ARRAY_TASK_ID and SLURM_PROCID
say which share is its, in a pod of Kubernetes JOB_COMPLETION_INDEX. The units after these may
begin as soon as Slurm sees this one end well, so what they read of it has to be there by then: the
stamps are written here and not by the one who waits on the head.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.base.documents import read_document
from trainkit.base.errors import Exit
from trainkit.base.files import read_json, restrict_umask, write_json
from trainkit.base.interrupts import keep_interrupts
from trainkit.base.process import start_time
from trainkit.base.worker import PARENT_VARIABLE, said_by_worker
from trainkit.stages.stamps import stamp_holds, stamp_unit

FORM = "level/1"
# of the runtime's client, where this runs in a container: Slurm kills that one alone
CLIENT_VARIABLE = "TRAINKIT_CLIENT_PID"
CLIENT_SECONDS = 0.5  # between two looks at it
# of a pod's, as launch/kubernetes/manifest.py sets them
NODE_VARIABLE = "TRAINKIT_NODE_NAME"
POD_VARIABLE = "TRAINKIT_POD_NAME"
TRIES = 3  # nodes that a unit may lose, as on hosts of a hostfile


def unit_share(level: Mapping[str, Any], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The units of this task; none where there are more tasks than shares."""
    if "SLURM_PROCID" in environment:
        element = int(environment["SLURM_ARRAY_TASK_ID"])
        number = element * int(level["tasks"]) + int(environment["SLURM_PROCID"])
    else:
        number = int(environment["JOB_COMPLETION_INDEX"])
    return list(level["shares"][number]) if number < len(level["shares"]) else []


def run_once(unit: Mapping[str, Any]) -> int:
    """Run one unit: its lines of JSON go to NAME.out, at last {"ended": code, "host": name};
    what it says to people to NAME.log. Returns its exit code.

    One that is made is not made again: a task is started again whose node failed or was taken
    back. One under which node after node fails is not begun again.
    """
    if stamp_holds(Path(unit["stamp"]), unit["digest"], tuple(map(Path, unit["outputs"]))):
        return 0
    out = Path(unit["out"])
    begun = Path(f"{unit['out']}.begun")
    here = _node()
    nodes = _lost(begun)
    if len(nodes) >= TRIES:
        message = (
            f"its node failed under it {len(nodes)} times ({', '.join(nodes)}): it may be the"
            " reason, by the memory that it takes"
        )
        error = {
            "problems": [{"message": message, "hint": f"what it said last: {unit['log']}"}],
            "exit": int(Exit.STAGE_FAILED),
        }
        out.write_text(
            f"{json.dumps({'error': error})}\n{json.dumps({'ended': 1, 'host': here})}\n"
        )
        return 1
    write_json(begun, {"job": _element(), "nodes": [*nodes, here]})
    try:
        return _run(unit, out)
    finally:  # at TERM too, by which a node is taken back; a node that fails leaves the file
        begun.unlink(missing_ok=True)


def _node() -> str:
    """The node's name: a pod has a host name of its own."""
    return os.environ.get(NODE_VARIABLE) or os.uname().nodename


def _element() -> str:
    """What this element of its array is called, however often it is begun: a job of Slurm's, or a
    pod's name without the letters that each new one has."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get(POD_VARIABLE, "").rpartition("-")[0]


def _lost(begun: Path) -> list[str]:
    """The nodes on which this very element of an array has begun the unit and never came to an
    end."""
    again = POD_VARIABLE in os.environ or int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if not again or not begun.is_file():
        return []
    value = read_json(begun)
    return list(map(str, value["nodes"])) if value["job"] == _element() else []


def _run(unit: Mapping[str, Any], out: Path) -> int:
    with open(out, "wb") as output, open(unit["log"], "wb") as log:
        environment = {**os.environ, **unit["env"], PARENT_VARIABLE: str(os.getpid())}
        code = subprocess.run(
            unit["argv"],
            cwd=out.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            check=False,
        ).returncode
    said = [line.get("result") for line in said_by_worker(out.read_bytes())]
    results = [result for result in said if isinstance(result, dict)]
    if code == 0 and results:
        stamp_unit(
            Path(unit["stamp"]),
            unit["name"],
            unit["digest"],
            map(Path, unit["outputs"]),
            results[-1],
        )
    with open(out, "ab") as output:
        output.write(json.dumps({"ended": code, "host": _node()}).encode() + b"\n")
    return code


def end_with_client(pid: int) -> None:
    """End as by Slurm's TERM when the process that has started our container is gone: with
    docker and podman we are not a child of it. Its pid is the host's, as are ours.

    Raises SystemExit (8) where there is no such process.
    """
    began = start_time(pid)
    if pid == os.getpid():
        return
    if not began:
        print(
            f"process {pid}, which has started this container, is not to be seen in it: it has"
            " ended, or the container was given processes of its own (its `args`)",
            file=sys.stderr,
        )
        sys.exit(int(Exit.START))

    def watch() -> None:
        while start_time(pid) == began:
            time.sleep(CLIENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """One that fails does not keep the others of this share from being done: a second call then
    has little to do."""
    restrict_umask()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if CLIENT_VARIABLE in os.environ:
        end_with_client(int(os.environ[CLIENT_VARIABLE]))
    level = read_document(Path(sys.argv[1]), FORM)
    with keep_interrupts():
        codes = [run_once(unit) for unit in unit_share(level, os.environ)]
    sys.exit(next((1 for code in codes if code), 0))


if __name__ == "__main__":
    main()
