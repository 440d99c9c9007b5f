"""Claim: in a run in which a rank is killed every minute, the kills cost less than 3 % of the time
(the ledger's start, lost and idle).

    python benchmarks/goodput.py [--hosts 1] [--minutes 20] [--every 60] [--set KEY=VALUE ...]

The tiny job of benchmarks/recovery.py on its cluster of namespaces, with a copy of the state in
memory every step, from `invoke train` to the stop. Ledger: what `report` says, the part of the wall
clock in training that was kept. Own clock: this program looks at metrics.jsonl, and counts as lost
the seconds to the first step, those from each kill to the first step that is new, and those from
the order to stop to the end, checkpoint included. Needs root and the packages that
tests/cluster/cluster.sh names.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from benchmarks.recovery import Trainkit, make_project, newest_step, wait_for  # noqa: E402
from tests.cluster.machines import Cluster, NoCluster  # noqa: E402
from trainkit.reports.ledger import build_ledger  # noqa: E402
from trainkit.reports.read import read_run_times  # noqa: E402
from trainkit.runs.folder import RunFolder  # noqa: E402
from trainkit.runs.record import read_run_record  # noqa: E402


def wait_for_new_step(run: RunFolder) -> float:
    """When a step was done that none did before, by this machine's clock."""
    done = newest_step(run)
    return wait_for("new step", lambda: newest_step(run) > done)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="The time that is kept with a kill a minute.")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the job")
    parser.add_argument("--quick", action="store_true", help="one minute, three kills")
    words = parser.parse_args()
    minutes = 1.0 if words.quick else words.minutes
    every = 20.0 if words.quick else words.every
    options = ["checkpoint.memory_interval=1", *words.set]
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster = Cluster(Path(folder) / "cluster", words.hosts + 1)
        except NoCluster as why:
            sys.exit(f"no cluster of namespaces here: {why}")
        try:
            project = make_project(Path(folder), words.hosts, 3.0)
            side = Trainkit(cluster, project, words.hosts, options)
            dice = random.Random(words.hosts)
            began = time.time()
            run = side.begin()
            lost = [time.time() - began]
            for at in range(1, round(60 * minutes / every) + 1):
                time.sleep(max(0.0, began + every * at - every / 2 - time.time()))
                ranks = side.ranks(run)
                host = dice.choice(sorted(ranks))
                killed = side.kill(host, ranks[host], agent=False)
                lost.append(wait_for_new_step(run) - killed)
            time.sleep(max(0.0, began + 60 * minutes - time.time()))
            stopped = time.time()
            side.end(run, "--save")  # else all since the last checkpoint is lost
            wall = time.time() - began
            lost.append(time.time() - stopped)
            steps = newest_step(run)
            ledger = build_ledger(read_run_times(read_run_record(run)))
        finally:
            cluster.close()
    first, *kills, last = lost
    print(f"{len(kills)} kills in {wall:.0f} s on {words.hosts} hosts, {steps} steps")
    shares = {name: seconds / ledger.wall_seconds for name, seconds in ledger.seconds.items()}
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)
    print(f"ledger: {shares['training']:.1%} in kept steps ({parts})")
    parts = f"start {first:.1f} s, a kill {median(kills):.2f} s, end {last:.1f} s"
    print(f"own clock: {1 - sum(lost) / wall:.1%} ({parts})")


if __name__ == "__main__":
    main()
