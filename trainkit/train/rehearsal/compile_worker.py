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
from trainkit.base.files import make_private_folder
from trainkit.base.locks import locked
from trainkit.base.process import on_this_node
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
from trainkit.train.rehearsal.forks import in_forks


def work(spec: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile. `spec` has "job", and the "environment" of its ranks. Returns {"graphs", "compiled",
    "cached", "ranks", "seconds"}."""
    job = Job.model_validate(spec["job"])
    try:
        os.environ.update(on_this_node(spec["environment"]))  # before torch reads it
    except KeyError as missing:
        raise TrainkitError(
            f"${{node:VAR}} asks for what is not in the environment of {os.uname().nodename}, which"
            f" compiles: {', '.join(missing.args)}",
            exit=Exit.STAGE_FAILED,
        ) from None
    fields = graph_fields(job)
    folder = node_folder(fields)
    make_private_folder(folder.parent)
    began = time.perf_counter()
    with locked(folder.with_suffix(".lock"), {"job": job.name}):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.environ[VARIABLE] = str(folder)
        found = _compile(job, folder / READY, progress)
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


def _refuse_missing_devices(job: Job) -> None:
    """Raise TrainkitError unless this machine has the GPUs of one of the job's nodes. A fork asks:
    who has asked CUDA anything has no forks that can use it."""
    import torch

    (seen,) = in_forks(lambda rank: {"devices": torch.cuda.device_count()}, [0], at_once=1)
    if (devices := seen["devices"]) < job.ranks_per_node:
        raise TrainkitError(
            f"graphs are compiled for each of the {job.ranks_per_node} GPUs of a node, whose number"
            f" is in them, and this machine has {devices}",
            exit=Exit.STAGE_FAILED,
            hint=f"clusters.{job.cluster.name}.stages.precompile names a partition whose nodes have"
            f" {job.ranks_per_node} x {job.cluster.device.name}",
        )


def _compile(job: Job, folder: Path, progress: ProgressCallback) -> list[Mapping[str, Any]]:
    """{"rank", "hits", "misses", "seconds"} of each rank that has graphs of its own."""
    from trainkit.train.batches import vocab_size
    from trainkit.train.ready_graphs import ReadyGraph, merge
    from trainkit.train.rehearsal.compiling import compile_ranks

    if job.cluster.device_type == "cuda":
        _refuse_missing_devices(job)
    vocab = vocab_size(job)
    found = []
    made = {}
    failed: set[str] = set()
    for each in compile_ranks(job, vocab, folder, at_once=len(os.sched_getaffinity(0))):
        found.append(each)
        progress(len(found), len(found) + 1)
        made[each["rank"]] = [ReadyGraph(**ready) for ready in each["made"]]
        failed.update(each["unmade"])
    counts = merge(folder, made, failed)
    ranks: list[Mapping[str, Any]] = []
    for each in found:
        new, old = counts[each["rank"]]
        sums = {"hits": each["hits"] + old, "misses": each["misses"] + new}
        ranks.append({"rank": each["rank"], **sums, "seconds": each["seconds"]})
        print(f"rank {each['rank']}: {ranks[-1]}", file=sys.stderr)
    return ranks


if __name__ == "__main__":
    run_unit(work)
