"""What a job may not exceed: memory of its devices and of its nodes, disks, time limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.checks import checks
from trainkit.plan.duration import (
    SIGNAL_PART,
    SIGNAL_SECONDS,
    Duration,
    spare_seconds,
    time_limit,
)
from trainkit.plan.host import HostMemory, available_bytes, host_memory_of
from trainkit.plan.layout import Layout, layout_of, padded_vocab_size
from trainkit.plan.memory import Memory, fits, memory_of
from trainkit.plan.objection import Change, Objection
from trainkit.plan.rules import Rules
from trainkit.plan.storage import GIB, Storage, checkpoints_on_disk
from trainkit.plan.suggestions import cheapest_change


@dataclass(frozen=True)
class Sizes:
    """What is known of a model's size, and how its memory follows from a layout.

    Args:
        rules: of the job's engine.
        vocab_size: ids, without padding.
        tokenizer_size: ids of the prepared tokenizer; None: not prepared.
        here: memory of this machine, where the ranks run on it.
        excess: how many times as much a run took as is planned without it.
    """

    rules: Rules
    vocab_size: int
    tokenizer_size: int | None
    here: int | None = None
    excess: float = 1.0

    def _of(self, job: Job) -> tuple[Job, Layout, Rules, int, int, float]:
        layout = layout_of(job)
        divisor = job.model.make_vocab_size_divisible_by
        padded = padded_vocab_size(self.vocab_size, divisor, layout.tensor)
        return job, layout, self.rules, self.vocab_size, padded, self.excess

    def memory(self, job: Job) -> Memory:
        """Of every stage."""
        return memory_of(*self._of(job))

    def host(self, job: Job, memory: Memory) -> HostMemory:
        """Of the fullest node."""
        return host_memory_of(job, layout_of(job), self.rules, memory, self.here)

    def fits(self, job: Job) -> bool:
        """Whether devices and nodes have room, as far as is known."""
        if not fits(*self._of(job)):
            return False
        if available_bytes(job, self.here)[0] is None:
            return True
        return self.host(job, self.memory(job)).fits is not False

    def codes(self, job: Job) -> set[str]:
        """Kinds of objections that `checks` has to a job."""
        return {objection.code for objection in checks(job, self.rules, self.tokenizer_size)}


def sample_objections(job: Job, most: int | None) -> Iterator[Objection]:
    """Data without a sample to train on, or without one to evaluate on.

    Args:
        job: of the native trainer; others repeat their data until they fill a sample.
        most: tokens that its dataset has at most; None: not known.
    """
    dataset = job.dataset
    length = job.model.seq_length
    if most is not None and most <= length:
        yield Objection(
            "too-few-tokens",
            "model.seq_length",
            f"a sample is {length:,} tokens and the one after them, and dataset {dataset.name} has"
            f" at most {most:,}",
        )
    if job.training.eval_iters and not _holds_out(dataset):
        message = (
            f"eval_iters {job.training.eval_iters}, and dataset {dataset.name} has no documents for"
            f" validation (split {dataset.split!r}): give it a second part, or do not evaluate"
        )
        changes = ({"training.eval_iters": 0},)
        yield Objection("no-validation-data", "training.eval_iters", message, changes)


def _holds_out(dataset: Dataset) -> bool:
    """Whether a part of it is for validation."""
    if dataset.source == "blend" and not (dataset.valid_blend or dataset.test_blend):
        return any(_holds_out(part.dataset) for part in dataset.blend.values())
    if dataset.source == "blend":
        return bool(dataset.valid_blend)
    if dataset.valid_files or dataset.source == "mock":
        return True
    if dataset.test_files:
        return False
    return float(dataset.split.split(",")[1]) > 0


def memory_objections(
    job: Job, sizes: Sizes, memory: Memory, host: HostMemory
) -> Iterator[Objection]:
    """The fullest rank needs more than its device has, or the ranks of a node more than the
    node."""

    def way_out() -> tuple[str, tuple[Change, ...]]:
        raised = sizes.codes(job)
        change = cheapest_change(job, sizes.fits, lambda tried: sizes.codes(tried) <= raised)
        if change is None:
            return "no change of layout, recomputation or number of nodes makes it fit", ()
        said = {key: str(v).lower() if isinstance(v, bool) else v for key, v in change.items()}
        words = " with ".join(f"{path} = {value}" for path, value in said.items())
        return f"the cheapest change that fits: {words}", (change,)

    if memory.fits is False and memory.device_bytes is not None:
        yield _device_objection(job, memory, memory.device_bytes, way_out)
    if host.fits is False and host.available_bytes is not None:
        ranks = f"{job.ranks_per_node} rank{'s' if job.ranks_per_node > 1 else ''}"
        node = f" of node {host.node}" if job.nodes > 1 else ""
        message = (
            f"{ranks}{node} together need {host.needed_bytes / GIB:.1f} GiB of main memory,"
            f" {host.source} has {host.available_bytes / GIB:.1f} GiB"
        )
        words, changes = ("", ()) if memory.fits is False else way_out()
        text = f"{message}; {words}" if words else message
        yield Objection("host-memory", "cluster.memory_bytes", text, changes)


def _device_objection(
    job: Job, memory: Memory, room: int, way_out: Callable[[], tuple[str, tuple[Change, ...]]]
) -> Objection:
    fullest = memory.fullest
    device = job.cluster.device
    stage = f" of stage {fullest.stage}" if len(memory.stages) > 1 else ""
    need = f"a rank{stage} needs {fullest.total_bytes / GIB:.1f} GiB"
    message = f"{need}, {device.label or device.name} has {room / GIB:.1f} GiB"
    words, changes = way_out()
    return Objection("memory", "cluster.device", f"{message}; {words}", changes)


def storage_objections(job: Job, storage: Storage, rules: Rules) -> Iterator[Objection]:
    """More checkpoints than the disk holds.

    Args:
        job: the job.
        storage: what it writes, and where.
        rules: of its engine: whether it deletes old checkpoints.
    """
    wanted = job.checkpoint.filesystem
    if wanted is not None and wanted not in job.cluster.filesystems:
        known = ", ".join(job.cluster.filesystems) or "none"
        message = f"cluster {job.cluster.name} has no file system {wanted!r}; known: {known}"
        yield Objection("no-such-filesystem", "checkpoint.filesystem", message)
    room = storage.capacity_bytes
    if room is None or storage.on_disk_bytes <= room:
        return
    where = f"file system {storage.filesystem}" if storage.filesystem else "the disk here"
    many = f"{storage.on_disk} checkpoints of" if storage.on_disk > 1 else "a checkpoint of"
    size = _gib(storage.checkpoint_bytes)
    message = f"{many} {size} on disk at once, {where} has {_gib(room)}"
    if not rules.deletes_old:
        out = "the engine deletes none: save less often, or delete old ones as it runs"
        yield Objection("disk-too-small", "training.save_interval", f"{message}; {out}")
        return
    key = "checkpoint.keep_last"
    at_once = room // storage.checkpoint_bytes
    most = min(job.checkpoint.keep_last - 1, at_once)
    fewer = next((n for n in range(most, 0, -1) if _kept(job, rules, n) <= at_once), None)
    if fewer is None:
        least = _kept(job, rules, 1)
        out = f"at least {_gib(least * storage.checkpoint_bytes)} are needed"
        yield Objection("disk-too-small", key, f"{message}; {out}")
    else:
        yield Objection("disk-too-small", key, f"{message}; nearest: {fewer}", ({key: fewer},))


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.3g} MiB"


def _kept(job: Job, rules: Rules, last: int) -> int:
    """Checkpoints on disk at once with another checkpoint.keep_last."""
    checkpoint = job.checkpoint.model_copy(update={"keep_last": last})
    return checkpoints_on_disk(job.model_copy(update={"checkpoint": checkpoint}), rules)


def time_objections(job: Job, duration: Duration, storage: Storage | None) -> Iterator[Objection]:
    """A time limit that leaves no time for a start, a step and a checkpoint."""
    limit = time_limit(job)
    if limit is None:
        return
    save = (storage and storage.write_seconds) or 0.0
    read = (storage and storage.read_seconds) or 0.0
    busy = duration.start_seconds + read + duration.step_seconds
    spare = spare_seconds(limit, save)
    if busy + spare <= limit:
        return
    enough = max(busy + save, min(busy / (1 - SIGNAL_PART), busy + SIGNAL_SECONDS))
    minutes = math.ceil(enough / 60)
    time = f"{minutes // 60}:{minutes % 60:02}:00"
    parts = f"a start takes about {duration.start_seconds + read:,.0f} s"
    parts += f", a step {duration.step_seconds:,.1f} s"
    parts += f", a checkpoint {save:,.0f} s" if save else ""
    message = (
        f"no step would be kept: the time limit is {limit:,} s, of which {spare:,.0f} s are left"
        f" for the save at its end; {parts}; nearest: {time}"
    )
    yield Objection("time-limit-too-short", "slurm.time", message, ({"slurm.time": time},))
