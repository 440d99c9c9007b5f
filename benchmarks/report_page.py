"""How long the page of a long run takes, and how large it is: `python benchmarks/report_page.py`.

A run of a million logged steps on 1,024 ranks, written by hand (0.8 GB in a temporary folder; rows
as long as real ones). Beside it, what reading all rows by the standard library's json takes: that
part alone.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path

from trainkit.reports.page import report_page
from trainkit.reports.read import read_report
from trainkit.runs.folder import RunFolder

STEPS = 1_000_000
RANKS = 1024
MAPS = 700  # lines of rank-times.jsonl that a run of a week writes


def row(step: int) -> dict[str, object]:
    """A row as the native engine writes it."""
    loss = 2.0 + 8.0 / math.sqrt(step + 1) + 0.01 * math.sin(step * 12.9898)
    times = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer"), 12.345678)
    kinds = ("parameters", "optimizer", "gradients", "max_allocated", "max_reserved")
    compared = dict.fromkeys(("compute_ms_least", "compute_ms_mean", "compute_ms_most"), 123.456789)
    return {
        "step": step,
        "consumed_samples": 1024 * step,
        "global_batch_size": 1024,
        "lm_loss": loss,
        "grad_norm": 0.5 + loss / 7,
        "learning_rate": 0.0003,
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "rollbacks": 0,
        "elapsed_ms": 500.0 + loss,
        "tokens_per_second": 4.1e6 / loss,
        "samples_per_second": 2048.123456,
        "model_tflops": 401.234567,
        "hardware_tflops": 401.234567,
        "mfu": 0.4056789,
        "hfu": 0.4056789,
        "peak": "989 TFLOP/s (H100 SXM, bf16)",
        "batch_checksum": 12345678901,
        "times_ms": times,
        "memory_bytes": dict.fromkeys(kinds, 12345678901),
        "ranks": {**compared, "slowest": 7, "communication_ms_mean": 9.87654},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "runs" / "long" / "20260101-000000-aaaa")
        run.path.mkdir(parents=True)
        run.job.write_text("{}")
        with open(run.metrics, "w") as file:
            file.writelines(json.dumps(row(step)) + "\n" for step in range(1, STEPS + 1))
        with open(run.path / "rank-times.jsonl", "w") as file:
            for step in range(1, MAPS + 1):
                times = [round(120 + (rank * step) % 97 / 9, 2) for rank in range(RANKS)]
                file.write(json.dumps({"step": step, "compute_ms": times}) + "\n")
        began = time.perf_counter()
        cpu = time.process_time()
        page = report_page(read_report(run))
        seconds = time.perf_counter() - began
        used = time.process_time() - cpu
        print(f"page of {STEPS:,} steps, {RANKS:,} ranks: {seconds:.1f} s ({used:.1f} s of CPU),")
        print(
            f"  {len(page) / 1e6:.2f} MB, of {run.metrics.stat().st_size / 1e6:.0f} MB of metrics"
        )
        if "--peer" in sys.argv:
            began = time.perf_counter()
            with open(run.metrics, "rb") as lines:
                for line in lines:
                    json.loads(line)
            print(f"json.loads of every row: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
