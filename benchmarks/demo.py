"""From a clone to the end of `demo`: seconds of each part, tokens/s against the machine's own
matmul rate, memory of each rank.

    python benchmarks/demo.py [--keep FOLDER]

Clones this checkout's HEAD into an empty folder and does there what the README says. The limit
printed beside the training speed is that of the same number of floating-point operations done as
one square fp32 matmul after another by the same number of processes, in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
MATMUL = """
import os, time, torch
torch.set_num_threads(1)
a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
for _ in range(3): a @ b
began = time.perf_counter()
for _ in range(40): a @ b
print(40 * 2 * 1024**3 / (time.perf_counter() - began))
"""


def timed(argv: list[str], folder: Path) -> float:
    """Seconds of a command that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - began


class PeakMemory:
    """Highest resident set (VmHWM) of the ranks of the newest run, read while they live."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ended = folder, threading.Event()
        self.peak: dict[int, float] = {}
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            for events in self.folder.glob("runs/*/*/attempts/*/events.jsonl"):
                for line in events.read_text().splitlines():
                    event = json.loads(line)
                    if event["event"] == "rank_started":
                        self._look(event["rank"], event["pid"])

    def _look(self, rank: int, pid: int) -> None:
        try:
            fields = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
        except OSError:
            return
        if "VmHWM" in fields:
            self.peak[rank] = int(fields["VmHWM"].split()[0]) / 2**20

    def stop(self) -> dict[int, float]:
        """GiB by rank."""
        self.ended.set()
        self.thread.join()
        return self.peak


def matmul_rate(python: Path, processes: int) -> float:
    """FLOP/s of `processes` single-threaded fp32 matmuls at once."""
    children = [
        subprocess.Popen([python, "-c", MATMUL], stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    return sum(float(child.communicate()[0]) for child in children)


def measure(folder: Path) -> list[tuple[str, str, str]]:
    """(what, measured, limit or target) rows."""
    subprocess.run(["git", "clone", "-q", str(CHECKOUT), str(folder)], check=True)
    install = timed(["./inv", "--list"], folder)
    python = folder / ".venv" / "bin" / "python"
    listing = sorted(timed([str(python), "-m", "invoke", "--list"], folder) for _ in range(7))[3]
    wrapped = sorted(timed(["./inv", "--list"], folder) for _ in range(7))[3]
    prepare = timed(["./inv", "prep-data"], folder)
    memory = PeakMemory(folder)
    train = timed(["./inv", "train", "demo"], folder)
    peak = memory.stop()
    report = json.loads(
        subprocess.run(
            ["./inv", "report", "last", "--json"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    run = Path(report["folder"])
    plan = json.loads((run / "plan.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reached = report["tokens_per_second"] * plan["model_flops_per_token"]
    limit = matmul_rate(python, plan["world_size"])
    return [
        ("installation (./inv, first use)", f"{install:.0f} s", ""),
        ("prep-data", f"{prepare:.1f} s", ""),
        ("train demo, start to end", f"{train:.0f} s", "under 180 s"),
        ("all of it", f"{install + prepare + train:.0f} s", "under 420 s"),
        ("optimizer steps alone", f"{report['seconds']:.0f} s", ""),
        ("tokens/s (median step)", f"{report['tokens_per_second']:,.0f}", "about 5,000"),
        (
            "model FLOP/s against bare matmuls",
            f"{reached / 1e9:.0f} G",
            f"{limit / 1e9:.0f} G, ratio {reached / limit:.2f}",
        ),
        (
            "training loss (mean of last tenth)",
            "{first:.3f} -> {last:.3f}".format(**report["training_loss"]),
            "8.3 -> under 5",
        ),
        ("validation loss", "{first:.3f} -> {last:.3f}".format(**report["validation_loss"]), ""),
        (
            "peak memory of a rank",
            ", ".join(f"{gib:.2f} GiB" for gib in peak.values()),
            "under 1.5 GB",
        ),
        ("invoke --list (median of 7)", f"{listing:.2f} s", "under 0.4 s"),
        ("./inv --list (median of 7)", f"{wrapped:.2f} s", ""),
        ("logged steps", str(sum("eval" not in r for r in rows)), ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keep", type=Path, help="clone into this folder, which must not exist, and leave it"
    )
    arguments = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores,"
        f" Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for what, value, target in measure(arguments.keep or Path(folder) / "clone"):
            print(f"{what:36s} {value:28s} {target}")


if __name__ == "__main__":
    main()
