"""One task of a Slurm array: does its share of the units of a level, one after another, and stamps each that succeeds.

`python -m trainkit.stages.task LEVEL.json` on a node; SLURM_ARRAY_TASK_ID and SLURM_PROCID say which share is its. The units after these may begin as
soon as Slurm sees this one end well, so what they read of it has to be there by then: the stamps are written here and not by whoever waits on the head.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.base.forms import read_form
from trainkit.base.unit import PARENT_VARIABLE
from trainkit.stages.stamps import stamp_holds, stamp_unit

FORM = "level/1"


def share(level: Mapping[str, Any], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The units of this task; none where there are more tasks than shares."""
    number = int(environment["SLURM_ARRAY_TASK_ID"]) * int(level["tasks"]) + int(environment["SLURM_PROCID"])
    return list(level["shares"][number]) if number < len(level["shares"]) else []


def do(unit: Mapping[str, Any]) -> int:
    """Run one unit: its lines of JSON go to NAME.out, at last {"ended": code, "host": name}; what it says to people to NAME.log. Returns its exit code.

    One that is made is not made again: Slurm starts a task anew whose node failed or was taken back.
    """
    if stamp_holds(Path(unit["stamp"]), unit["digest"], tuple(map(Path, unit["outputs"]))):
        return 0
    out = Path(unit["out"])
    with open(out, "wb") as said, open(unit["log"], "wb") as log:
        environment = {**os.environ, **unit["env"], PARENT_VARIABLE: str(os.getpid())}
        code = subprocess.run(unit["argv"], cwd=out.parent, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=log, check=False).returncode
    result = _result(out)
    if code == 0 and result is not None:
        stamp_unit(Path(unit["stamp"]), unit["name"], unit["digest"], map(Path, unit["outputs"]), result)
    with open(out, "ab") as said:
        said.write(json.dumps({"ended": code, "host": os.uname().nodename}).encode() + b"\n")
    return code


def _result(out: Path) -> dict[str, Any] | None:
    for line in reversed(out.read_bytes().splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("result"), dict):
            return dict(value["result"])
    return None


def main() -> None:
    """One that fails does not keep the others of this share from being done: a second call then has little to do."""
    level = read_form(Path(sys.argv[1]), FORM)
    codes = [do(unit) for unit in share(level, os.environ)]
    sys.exit(next((1 for code in codes if code), 0))


if __name__ == "__main__":
    main()
