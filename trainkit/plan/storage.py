"""Checkpoints on disk: how large, how many, how long to write, and whether they fit."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.jobs.clusters import Filesystem
from trainkit.jobs.schema import Job, Training
from trainkit.plan.parameter_shapes import chunk_units, numbers, optimizer_state
from trainkit.plan.rules import Rules

GIB = 2**30


def checkpoint_bytes(job: Job, rules: Rules, vocab_size: int) -> int:
    """Bytes of one checkpoint. Of a parameter, native 12, the fp32 weight and Adam's two moments;
    Megatron-LM, GPT-NeoX and NeMo 14, with the 16-bit weight (BLOOM-176B: 2.244 TiB, GPT-NeoX-20B:
    268.0 GiB, as published). SGD's one momentum makes 4 less, none 8 less.

    Args:
        vocab_size: rows of the embedding as the engine keeps it.
    """
    units = chunk_units(job.model, vocab_size)
    weight = rules.checkpoint_weights[job.training.precision]
    return weight * numbers(units) + 4 * optimizer_state(units, job.training)


def read_seconds(size: float, tier: Filesystem | None) -> float | None:
    """Seconds to read a checkpoint that all ranks read at once, at the file system's bandwidth;
    as fast as it is written where nobody says more."""
    bandwidth = tier and (tier.read_gib_per_second or tier.write_gib_per_second)
    return write_seconds(size, bandwidth) if bandwidth else None


def write_seconds(size: float, gib_per_second: float) -> float:
    """Seconds to write so many bytes. Published tables of file systems count in GiB/s: 2.3 TiB
    take 2.04 minutes at 19.2, 0.15 at 256."""
    return size / (gib_per_second * GIB)


def writes_checkpoints(job: Job, rules: Rules) -> bool:
    """False where the job switches them off by the engine's own key, which is written in one
    piece or as tables in each other."""
    given: object = job.engine_args.get(rules.saves_key)
    if given is None:
        given = job.engine_args
        for name in rules.saves_key.split("."):
            given = given.get(name) if isinstance(given, dict) else None
    return given is not False


def checkpoints_written(training: Training) -> int:
    """Checkpoints of a whole run: one every save_interval steps, and one at the end."""
    every = training.save_interval or training.train_iters
    return -(-training.train_iters // every)


def checkpoints_on_disk(job: Job, rules: Rules) -> int:
    """The most that lie there at once: what checkpoint.keep_* keep and the one being written;
    all of them where the engine deletes none."""
    written = checkpoints_written(job.training)
    keep = job.checkpoint
    if keep.keep_every:
        for_ever = job.training.train_iters // math.lcm(
            keep.keep_every, job.training.save_interval or 1
        )
    else:
        for_ever = 0
    if rules.deletes_old:
        return min(written + keep.save_first, keep.keep_last + 1 + keep.keep_best + for_ever)
    return written


def filesystem_of(job: Job) -> tuple[str, Filesystem] | None:
    """Where checkpoints go, by name: as the job says, else the cluster's only one, else that
    whose path holds the cluster's root; None without any."""
    tiers = job.cluster.filesystems
    if job.checkpoint.filesystem is not None:
        found = tiers.get(job.checkpoint.filesystem)
        if found:
            return (job.checkpoint.filesystem, found)
        return None
    if len(tiers) == 1:
        return next(iter(tiers.items()))
    around = [(name, tier) for name, tier in tiers.items() if tier.path and _holds(tier.path, job)]
    return max(around, key=lambda found: len(found[1].path or ""), default=None)


def _holds(path: str, job: Job) -> bool:
    """Whether the runs of a job lie below `path`."""
    return job.cluster.root is not None and PurePosixPath(job.cluster.root).is_relative_to(path)


def elsewhere(job: Job) -> str | None:
    """The path of the file system that checkpoint.filesystem names, where runs do not lie below
    it."""
    found = filesystem_of(job)
    path = found[1].path if found else None
    return path if path and job.cluster.root and not _holds(path, job) else None


@dataclass(frozen=True)
class Storage(Record):
    """What a run writes.

    Args:
        checkpoint_bytes: one checkpoint.
        checkpoints: written over the run; `on_disk`: at once, at most.
        on_disk_bytes: of those.
        capacity_bytes: of the file system, or what is free on this machine's; None: unknown.
        filesystem: its name; None: none is named.
        write_seconds: one checkpoint at the file system's bandwidth, `read_seconds` the same; None:
            unknown.
    """

    checkpoint_bytes: int
    checkpoints: int
    on_disk: int
    on_disk_bytes: int
    capacity_bytes: int | None
    filesystem: str | None
    write_seconds: float | None
    read_seconds: float | None


def storage_of(job: Job, rules: Rules, vocab_size: int, free_bytes: int | None = None) -> Storage:
    """What `job` writes.

    Args:
        vocab_size: as of `checkpoint_bytes`.
        free_bytes: what is free where a cluster without file systems of its own keeps runs.
    """
    size = checkpoint_bytes(job, rules, vocab_size)
    tier = filesystem_of(job)
    at_once = checkpoints_on_disk(job, rules)
    bandwidth = tier[1].write_gib_per_second if tier else None
    return Storage(
        checkpoint_bytes=size,
        checkpoints=checkpoints_written(job.training),
        on_disk=at_once,
        on_disk_bytes=at_once * size,
        capacity_bytes=(
            tier[1].capacity_bytes if tier else None if job.cluster.filesystems else free_bytes
        ),
        filesystem=tier[0] if tier else None,
        write_seconds=write_seconds(size, bandwidth) if bandwidth else None,
        read_seconds=read_seconds(size, tier[1] if tier else None),
    )
