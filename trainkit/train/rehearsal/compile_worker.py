"""The unit of the stage precompile: the graphs of every distinct rank, compiled by forks of one
process, with a process group in which nobody else is and one layer of each kind."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import locked
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.schema import Job
from trainkit.train.compiled_graphs import (
    READY,
    VARIABLE,
    GraphFiles,
    graph_fields,
    machine_fields,
    node_folder,
    pack,
)


def work(spec: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile. `spec` has "job", and "threads" of a rank. Returns {"graphs", "compiled",
    "cached", "ranks", "seconds"}."""
    job = Job.model_validate(spec["job"])
    fields = graph_fields(job)
    folder = node_folder(fields)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    began = time.perf_counter()
    with locked(folder.with_suffix(".lock"), {"job": job.name}):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.environ[VARIABLE] = str(folder)
        found = _compile(job, spec["threads"], folder / READY, progress)
        fields = {**fields, **machine_fields(job)}
        seconds = time.perf_counter() - began
        pack(folder, GraphFiles.of(job), fields, seconds=round(seconds, 3), ranks=found)
        shutil.rmtree(folder)  # a rank unpacks what is whole
    compiled = sum(each["misses"] for each in found)
    cached = sum(each["hits"] for each in found)
    return {
        "graphs": compiled + cached,
        "compiled": compiled,
        "cached": cached,
        "ranks": len(found),
        "seconds": round(seconds, 3),
    }


def _compile(
    job: Job, threads: int, folder: Path, progress: ProgressCallback
) -> list[Mapping[str, Any]]:
    """{"rank", "hits", "misses", "seconds"} of each rank that has graphs of its own."""
    import torch

    from trainkit.train.batches import vocab_size
    from trainkit.train.ready_graphs import ReadyGraph, merge
    from trainkit.train.rehearsal.compiling import compile_ranks

    if job.cluster.device_type == "cuda" and not torch.cuda.is_available():
        raise TrainkitError(
            f"graphs of {job.cluster.device.name} are compiled where there is one, and this machine"
            " has none",
            exit=Exit.STAGE_FAILED,
            hint=f"clusters.{job.cluster.name}.stages.precompile names a partition that has",
        )
    torch.set_num_threads(threads)  # a part of what a CPU's kernels are looked up by
    vocab = vocab_size(job)
    found = []
    made = {}
    for each in compile_ranks(job, vocab, folder, at_once=len(os.sched_getaffinity(0))):
        found.append(each)
        progress(len(found), len(found) + 1)
        made[each["rank"]] = [ReadyGraph(**ready) for ready in each["made"]]
    counts = merge(folder, made)
    ranks: list[Mapping[str, Any]] = []
    for each in found:
        new, old = counts[each["rank"]]
        sums = {"hits": each["hits"] + old, "misses": each["misses"] + new}
        ranks.append({"rank": each["rank"], **sums, "seconds": each["seconds"]})
        print(f"rank {each['rank']}: {ranks[-1]}", file=sys.stderr)
    return ranks


if __name__ == "__main__":
    run_unit(work)
