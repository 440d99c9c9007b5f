"""The program that traces some ranks of a job: a process of its own, for a process has one world
at a time, and torch is large."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# what is computed has no numbers: threads would only wait
os.environ.setdefault("OMP_NUM_THREADS", "1")

from trainkit.base.process import no_garbage_collection
from trainkit.base.worker import ProgressCallback, run_unit


def work(spec: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Trace. `spec` has "job", the path of a job.json, "ranks", "vocab" and "at_once"; returns
    {"traces"}."""
    with no_garbage_collection():
        from trainkit.jobs.resolved import read_job
        from trainkit.train.rehearsal.trace import RankTrace, further_ranks, trace_ranks

    job = read_job(Path(spec["job"]))
    ranks = spec["ranks"]
    found: list[RankTrace] = []
    while ranks:
        for trace in trace_ranks(job, ranks, spec["vocab"], at_once=spec["at_once"]):
            found.append(trace)
            progress(len(found), len(ranks))
        if len(found) > len(ranks):
            break
        ranks = further_ranks(job, spec["vocab"], found)
    found.sort(key=lambda trace: trace.rank)
    return {"traces": [trace.to_json() for trace in found]}


if __name__ == "__main__":
    run_unit(work)
