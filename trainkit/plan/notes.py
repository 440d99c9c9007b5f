"""What is worth knowing before a job runs, though nothing speaks against it."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.jobs.schema import Job
from trainkit.plan.activations import fullest
from trainkit.plan.checks import SCHEDULE, VIRTUAL
from trainkit.plan.duration import Duration, Epochs, time_limit
from trainkit.plan.grid_checks import EP
from trainkit.plan.host import HostMemory
from trainkit.plan.layout import layout_of
from trainkit.plan.limits import Sizes
from trainkit.plan.memory import Memory
from trainkit.plan.objection import Change, Objection, try_change
from trainkit.plan.rules import Rules
from trainkit.plan.storage import GIB, Storage, elsewhere
from trainkit.plan.suggestions import smaller_micro_batches

LARGE = 0.15  # of a step: below, a bubble is not worth a word
LESS = 0.75  # a change that leaves more of the bubble is not worth a word
# up to four, repeated text is worth nearly as much as new text (Muennighoff et al. 2023,
# arXiv:2305.16264)
MANY_EPOCHS = 4
MUCH = 0.1  # of the steps' time, for checkpoints
LONG = 1000  # steps: a training of so many wants a checkpoint before the end
LOST = 0.01  # of the time: below, the interval of checkpoints is not worth a word


def notes(
    job: Job,
    sizes: Sizes,
    memory: Memory,
    storage: Storage | None,
    duration: Duration | None,
    epochs: Epochs | None,
) -> Iterator[Objection]:
    """Notes of a plan, as objections that do not make it infeasible.

    Args:
        job: the job.
        sizes: how its memory follows from a layout.
        memory: of its ranks.
        storage: of its checkpoints; None where none is written.
        duration: of the run; None where no speed is known.
        epochs: of its dataset; None where its size is unknown.
    """
    yield from _settings(job)
    yield from _loads(job)
    yield from _memory(job, memory)
    if storage is not None:
        yield from _storage(job, storage)
    if epochs is not None and epochs.epochs > MANY_EPOCHS:
        yield Objection(
            "many-epochs",
            "training.train_iters",
            f"dataset {job.dataset.name} is read {epochs.epochs:,.1f} times",
        )
    yield from _interval(job, duration)
    yield from _bubble(job, sizes, duration)


def _settings(job: Job) -> Iterator[Objection]:
    """Settings without the effect that one might expect."""
    parallelism = job.parallelism
    device = job.cluster.device
    if parallelism.sequence_parallel and parallelism.tensor_model_parallel_size == 1:
        yield Objection(
            "sequence-parallel-off",
            "parallelism.sequence_parallel",
            "sequence_parallel is off at tensor-parallel size 1, as in Megatron-LM",
        )
    if job.cluster.hostfile and not job.cluster.launcher_traits.hostfile:
        message = f"launcher {job.cluster.launcher} reads no hostfile: {job.cluster.hostfile}"
        yield Objection("hostfile-unread", "cluster.hostfile", message)
    training = job.training
    if training.warmup_iters > training.train_iters:
        message = (
            f"warmup lasts {training.warmup_iters:,.0f} steps, training {training.train_iters:,}:"
            f" the learning rate never reaches {training.lr:g}"
        )
        yield Objection("warmup-beyond-end", "training.lr_warmup_iters", message)
    if (training.save_interval or 0) > training.train_iters >= LONG:
        yield Objection(
            "saved-at-the-end-only",
            "training.save_interval",
            f"a checkpoint every {training.save_interval:,} steps of {training.train_iters:,}:"
            " there is none before the end, so a run that is killed begins again",
        )
    if training.precision == "fp8" and (device.kind == "cpu" or not training.compile):
        slow = "on a CPU it is emulated, slower than fp32"
        if device.kind != "cpu":
            slow = "without training.compile rounding takes longer than the products save"
        yield Objection("fp8-slow", "training.precision", f"training.precision = 'fp8': {slow}")
    if device.peak_tflops and job.training.precision not in device.peak_tflops:
        yield Objection(
            "no-peak",
            "training.precision",
            f"the device table knows no {job.training.precision} of {device.label or device.name}",
        )


def _loads(job: Job) -> Iterator[Objection]:
    """Experts on several ranks: what is assumed of their loads."""
    moe = job.model.moe
    ranks = job.parallelism.expert_model_parallel_size
    if moe is None or ranks == 1:
        return
    here = moe.num_experts / ranks
    worst = ranks * min(moe.router_topk, here) / moe.router_topk
    worst = min(worst, moe.expert_capacity_factor or worst)
    yield Objection(
        "expert-loads",
        EP,
        f"memory counts {fullest(job):g} times the mean of tokens on the rank whose experts get"
        f" most, time even loads; at worst it is {worst:,.4g} times: watch the loads of experts in"
        " metrics",
    )


def not_known(
    job: Job, rules: Rules, memory: Memory, host: HostMemory, duration: Duration | None
) -> Iterator[Objection]:
    """What decides whether the job can run and was not looked at: since nobody says what there is
    of memory, and under a time limit of speed; and what an engine's own options make of a model.

    Args:
        job: the job.
        rules: of its engine.
        memory: of its ranks.
        host: of its nodes.
        duration: of the run; None where no speed is known.
    """
    for key, value in job.engine_args.items():
        name = key.lstrip("+").replace("-", "_")
        if name in rules.uncounted and str(value) not in ("0", "1", "False"):
            yield Objection(
                "not-counted",
                f"engine_args.{key}",
                f"memory, time and layout with engine_args.{key} = {value}: the plan counts the"
                " model without it",
            )
    device = job.cluster.device
    if job.cluster.device_type == "cpu":
        if memory.fits is None and host.fits is None:
            yield Objection(
                "host-memory-unknown",
                "cluster.memory_bytes",
                f"whether {host.needed_bytes / GIB:,.1f} GiB fit a node: the table of cluster"
                f" {job.cluster.name} has no memory_bytes",
            )
    elif memory.device_bytes is None:
        yield Objection(
            "device-memory-unknown",
            "cluster.device",
            f"whether {memory.fullest.total_bytes / GIB:,.1f} GiB fit a rank: the device table"
            f" knows no memory of {device.name} (devices.{device.name}.memory_bytes)",
        )
    if duration is None and layout_of(job).fills_world and (limit := time_limit(job)) is not None:
        yield Objection(
            "time-unknown",
            "slurm.time",
            f"whether the time limit of {limit:,} s leaves time for a step: the speed of"
            f" {device.label or device.name} is not known",
        )


def _memory(job: Job, memory: Memory) -> Iterator[Objection]:
    """Memory that is nearly used up."""
    if memory.tight and memory.device_bytes:
        part = memory.fullest.total_bytes / memory.device_bytes
        yield Objection(
            "memory-tight",
            "cluster.device",
            f"the fullest rank takes {part:.0%} of its device, of which the reserve is assumed: it"
            " may not fit",
        )
    elif (
        memory.fits
        and memory.device_bytes
        and memory.band
        and memory.band_bytes
        and memory.band_bytes[1] > memory.device_bytes
    ):
        low, high = (size / 2**30 for size in memory.band_bytes)
        message = (
            f"published runs of engine {job.engine} took {low:.0f} to {high:.0f} GiB where this"
            f" plan says {memory.fullest.total_bytes / 2**30:.0f}"
        )
        yield Objection("memory-band", "cluster.device", f"{message}: it may not fit")


def _storage(job: Job, storage: Storage) -> Iterator[Objection]:
    """File systems that are unknown, or are not where the run folder is."""
    if storage.filesystem is None and len(job.cluster.filesystems) > 1:
        names = ", ".join(job.cluster.filesystems)
        yield Objection(
            "filesystem-not-named",
            "checkpoint.filesystem",
            f"checkpoint.filesystem names none of {names}: time to write and room are not known",
        )
    if (path := elsewhere(job)) is not None:
        message = (
            f"file system {storage.filesystem} is mounted at {path}, and the cluster's root"
            f" {job.cluster.root}, where checkpoints go, is not below it"
        )
        yield Objection("root-elsewhere", "checkpoint.filesystem", message)


def _interval(job: Job, duration: Duration | None) -> Iterator[Objection]:
    """Checkpoints much too often or too seldom."""
    if duration is None:
        return
    training = job.training
    parts = duration.parts
    every = training.save_interval or training.train_iters
    best = min(duration.checkpoint_steps or training.train_iters, training.train_iters)
    if (parts.saves or 0.0) > MUCH * parts.steps and every < best:
        message = (
            f"a checkpoint every {every:,} steps: training waits"
            f" {(parts.saves or 0.0) / parts.steps:.0%} of the steps' time for them; every {best:,}"
            " steps loses least"
        )
        changes = ({"training.save_interval": best},)
        yield Objection("save-interval", "training.save_interval", message, changes)
        return
    asked = duration.lost_as_asked
    least = duration.lost_fraction
    if asked is None or least is None or parts.steps <= (duration.checkpoint_seconds or 0):
        return
    if asked > max(LOST, 2 * least):
        message = (
            f"a checkpoint every {every:,} steps loses {asked:.1%} of the time to writing and to"
            f" failures; every {best:,} loses least, {least:.1%}"
        )
        yield Objection("save-interval", "training.save_interval", message)


def _interleaved(job: Job) -> Iterator[Change]:
    """More chunks of each stage, the most first: the bubble gets shorter, transfers more."""
    parallelism = job.parallelism
    layers = job.model.num_layers
    now = parallelism.virtual_pipeline_model_parallel_size or 1
    for virtual in range(layers // parallelism.pipeline_model_parallel_size, now, -1):
        yield {VIRTUAL: virtual, SCHEDULE: "1f1b"} if now > 1 else {VIRTUAL: virtual}


def _bubble(job: Job, sizes: Sizes, duration: Duration | None) -> Iterator[Objection]:
    """A note where a large part of each step is bubble and another layout would cut it: that with
    the shortest, of those that fit and raise no other objection."""
    now = layout_of(job).bubble_fraction
    if now < LARGE:
        return
    raised = sizes.codes(job)
    best = LESS * now
    found = None
    virtual = job.parallelism.virtual_pipeline_model_parallel_size
    zero_bubble: list[Change] = [] if virtual else [{SCHEDULE: "zbv"}]
    # of micro-batches of the same global batch the smallest first
    for kind in (_interleaved(job), zero_bubble, reversed([*smaller_micro_batches(job)])):
        for change in kind:
            tried = try_change(job, change)
            if tried is None or not sizes.codes(tried) <= raised or not sizes.fits(tried):
                continue
            if (bubble := layout_of(tried).bubble_fraction) < best:
                best = bubble
                found = change
            break  # the first of a kind that can be is its best
    message = f"{now:.1%} of each step is pipeline bubble"
    if found is None:
        more = "only more micro-batches a step (training.global_batch_size) would cut it"
        yield Objection(
            "large-bubble", "parallelism.pipeline_model_parallel_size", f"{message}; {more}"
        )
        return
    words = " with ".join(f"{path} = {value}" for path, value in found.items())
    message += f"; {words} leaves {best:.1%}"
    if duration is not None:
        days = duration.parts.steps / 86400
        message += f": {days * (1 - now) / (1 - best):,.1f} days of steps instead of {days:,.1f}"
    yield Objection("large-bubble", next(iter(found)), message, (found,))
