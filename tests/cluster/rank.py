"""A rank without torch, for tests of what happens around ranks: runs the Python file that
RANK_DOES names, with these names in it.

rank, host, attempt: who it is. beat(step, phase="train"): what the trainer's heartbeat says.
done(): its word of success. steps(n, seconds): n steps of so many seconds each, with their
beats. Told by USR1 to save, it exits with 12, as a trainer does.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    # after -I, the path of the trainer in whose place this runs
    sys.path.insert(0, str(Path(sys.argv[2]).resolve().parents[2]))
    from trainkit.base.process import die_with_parent
    from trainkit.train.metrics.heartbeat import Heartbeat, Phase

    die_with_parent(int(os.environ["TRAINKIT_PARENT_PID"]))
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(12))
    if "SLURM_JOB_ID" in os.environ:
        # as a trainer does, but for a TERM of its agent's
        signal.signal(signal.SIGTERM, lambda *_: os._exit(12))
    rank = int(os.environ["RANK"])
    heartbeat = Heartbeat(Path(os.environ["TRAINKIT_HEARTBEAT_FILE"]), rank)

    def beat(step: int, phase: Phase = "train") -> None:
        heartbeat.beat(phase, step)

    def steps(number: int, seconds: float) -> None:
        for step in range(1, number + 1):
            beat(step)
            time.sleep(seconds)

    def done() -> None:
        heartbeat.beat("done", heartbeat.step)

    beat(0, "start")
    names = {
        "rank": rank,
        "host": os.uname().nodename,
        "attempt": int(sys.argv[-1]),
        "beat": beat,
        "steps": steps,
        "done": done,
    }
    runpy.run_path(os.environ["RANK_DOES"], init_globals=names)


if __name__ == "__main__":
    main()
