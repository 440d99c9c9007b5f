"""What a job will need, worked out before anything runs: pure functions, every objection at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.base.forms import document
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of, parameters_of
from trainkit.plan.batch import consumed_after
from trainkit.plan.checks import checks
from trainkit.plan.duration import Duration, Epochs, assumed_speed, duration_of, epochs_of
from trainkit.plan.layout import Layout, layout_of, padded_vocab_size
from trainkit.plan.measured import Measured, measured_speed
from trainkit.plan.memory import Memory, fits, memory_of
from trainkit.plan.notes import notes
from trainkit.plan.objection import Objection, in_words, try_change
from trainkit.plan.relief import cheapest_change
from trainkit.plan.rules import Rules
from trainkit.plan.storage import GIB, NATIVE, Storage, checkpoint_bytes_per_parameter, storage_of

__all__ = ["Objection", "Plan", "checkpoint_bytes_per_parameter", "make_plan"]


@dataclass(frozen=True)
class Prepared:
    """What is known of this machine and of data that is there already.

    Args:
        vocab_size: ids of the prepared tokenizer: a BPE trained on little text stays below what its table asks for.
        dataset_tokens: tokens of the prepared dataset.
        free_bytes: what is free where a cluster without file systems of its own keeps runs.
    """

    vocab_size: int | None = None
    dataset_tokens: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of a job. `parameters` and what follows from it are None while the vocabulary is unknown.

    `global_batch_size` is that of a step after the ramp-up, if there is one; `tokens` counts the smaller batches before. `parameters` are the native
    model's; `engine_parameters` count the padded vocabulary where the engine keeps it. `duration` is None where no speed is known or assumed.
    """

    job: str
    engine: str
    layout: Layout
    gradient_accumulation_steps: int
    global_batch_size: int
    tokens: int
    vocab_size: int | None
    padded_vocab_size: int | None
    parameters: int | None
    engine_parameters: int | None
    model_flops_per_token: int | None
    hardware_flops_per_token: int | None
    memory: Memory | None
    storage: Storage | None
    duration: Duration | None
    epochs: Epochs | None
    measured: Measured | None
    objections: tuple[Objection, ...]
    notes: tuple[Objection, ...]

    @property
    def feasible(self) -> bool:
        return not self.objections

    @property
    def world_size(self) -> int:
        return self.layout.world

    @property
    def data_parallel_size(self) -> int:
        return self.layout.data

    @property
    def checkpoint_bytes(self) -> int | None:
        """Of one checkpoint."""
        return self.storage.checkpoint_bytes if self.storage else None

    @property
    def days(self) -> float | None:
        """Of all steps, nothing lost; None where no speed is known."""
        return self.duration.days if self.duration else None

    def to_json(self) -> dict[str, Any]:
        """The form plan/1."""
        sizes = ("vocab_size", "padded_vocab_size", "parameters", "engine_parameters", "model_flops_per_token", "hardware_flops_per_token", "checkpoint_bytes")
        batch = ("world_size", "data_parallel_size", "gradient_accumulation_steps", "global_batch_size", "tokens")
        parts = {key: getattr(self, key) for key in ("memory", "storage", "duration", "epochs", "measured")}
        return document(
            "plan/1",
            **{key: getattr(self, key) for key in ("job", "engine", "feasible", *batch, *sizes)},
            layers_by_stage=list(self.layout.layers_by_stage),
            bubble_fraction=self.layout.bubble_fraction,
            days=self.days,
            **{key: part.to_json() if part else None for key, part in parts.items()},
            objections=[objection.to_json() for objection in self.objections],
            notes=[note.to_json() for note in self.notes],
        )


@dataclass(frozen=True)
class _Sizes:
    """What is known of a model's size, and how its memory follows from a layout."""

    rules: Rules
    vocab_size: int
    tokenizer_size: int | None

    def _of(self, job: Job) -> tuple[Job, Layout, Rules, int, int]:
        layout = layout_of(job)
        return job, layout, self.rules, self.vocab_size, padded_vocab_size(self.vocab_size, job.model.make_vocab_size_divisible_by, layout.tensor)

    def memory(self, job: Job) -> Memory:
        """Of every stage."""
        return memory_of(*self._of(job))

    def fits(self, job: Job) -> bool:
        """As far as is known."""
        return fits(*self._of(job))

    def codes(self, job: Job) -> set[str]:
        """Kinds of objections that `checks` has to a job."""
        return {objection.code for objection in checks(job, self.rules, self.tokenizer_size)}


def _settled(job: Job, rules: Rules, tokenizer_size: int | None, sizes: _Sizes | None) -> Iterator[Objection]:
    """Objections of `checks`, each with the changes that settle it and raise no other, nor one of memory."""
    found = list(checks(job, rules, tokenizer_size))
    codes = {objection.code for objection in found}
    fitted = sizes is not None and sizes.fits(job)
    for objection in found:
        kept = []
        for change in objection.changes:
            if (tried := try_change(job, change)) is None:
                continue
            left = {other.code for other in checks(tried, rules, tokenizer_size)}
            if left <= codes - {objection.code} and (sizes is None or not fitted or sizes.fits(tried)):
                kept.append(change)
        way_out = in_words(kept, objection.key)
        yield Objection(objection.code, objection.key, objection.message + (f"; {way_out}" if way_out else ""), tuple(kept))


def _memory_objections(job: Job, sizes: _Sizes, memory: Memory) -> Iterator[Objection]:
    """The fullest rank needs more than its device has."""
    if memory.fits is not False or memory.device_bytes is None:
        return
    raised, fullest, device = sizes.codes(job), memory.fullest, job.cluster.device
    stage = f" of stage {fullest.stage}" if len(memory.stages) > 1 else ""
    message = f"a rank{stage} needs {fullest.total_bytes / GIB:.1f} GiB, {device.label or device.name} has {memory.device_bytes / GIB:.1f} GiB"
    change = cheapest_change(job, sizes.fits, lambda tried: sizes.codes(tried) <= raised)
    if change is None:
        yield Objection("memory", "cluster.device", f"{message}; no change of layout, recomputation or number of nodes makes it fit")
        return
    words = " with ".join(f"{path} = {value}" for path, value in change.items())
    yield Objection("memory", "cluster.device", f"{message}; the cheapest change that fits: {words}", (change,))


def _storage_objections(job: Job, storage: Storage) -> Iterator[Objection]:
    """More checkpoints than the disk holds."""
    wanted = job.checkpoint.filesystem
    if wanted is not None and wanted not in job.cluster.filesystems:
        known = ", ".join(job.cluster.filesystems) or "none"
        yield Objection("no-such-filesystem", "checkpoint.filesystem", f"cluster {job.cluster.name} has no file system {wanted!r}; known: {known}")
    room = storage.capacity_bytes
    if room is None or storage.on_disk_bytes <= room:
        return
    where = f"file system {storage.filesystem}" if storage.filesystem else "the disk here"
    many = f"{storage.on_disk} checkpoints of" if storage.on_disk > 1 else "a checkpoint of"
    message = f"{many} {storage.checkpoint_bytes / GIB:,.1f} GiB on disk at once, {where} has {room / GIB:,.1f} GiB"
    if storage.on_disk > job.checkpoint.keep_last + 1:
        yield Objection("disk-too-small", "training.save_interval", f"{message}; the engine deletes none: save less often, or delete old ones as it runs")
        return
    key, fewer = "checkpoint.keep_last", room // storage.checkpoint_bytes - 1
    changes = ({key: fewer},) if fewer >= 1 else ()
    yield Objection("disk-too-small", key, f"{message}{f'; nearest: {fewer}' if changes else ''}", changes)


def make_plan(
    job: Job,
    vocab_size: int | None = None,
    *,
    rules: Rules = NATIVE,
    prepared: Prepared | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Plan `job`.

    Args:
        vocab_size: that of its prepared tokenizer, as `prepared` may say too.
        rules: those of the job's engine.
        prepared: what else is there already.
        measured: what the last run of this job on this cluster took.

    Raises ValueError for the rules of another engine.
    """
    if rules.engine != job.engine:
        raise ValueError(f"job {job.name} is for engine {job.engine}, these are the rules of {rules.engine}")
    there = prepared or Prepared()
    trained, tokenizer = vocab_size or there.vocab_size, job.dataset.tokenizer
    vocab = job.model.vocab_size or trained or (tokenizer.vocab_size if tokenizer else None)
    tokens = consumed_after(job, job.training.train_iters) * job.model.seq_length
    sizes = _Sizes(rules, vocab, trained) if vocab else None
    epochs = epochs_of(job.dataset, tokens, there.dataset_tokens)
    memory, objections = sizes.memory(job) if sizes else None, list(_settled(job, rules, trained, sizes))
    if sizes and memory:
        objections += _memory_objections(job, sizes, memory)
    counts = _counts(job, rules, vocab)
    storage = storage_of(job, rules, counts["engine_parameters"], there.free_bytes) if counts["engine_parameters"] else None
    if storage:
        objections += _storage_objections(job, storage)
    duration = _duration(job, counts, tokens, storage, measured)
    return Plan(
        job=job.name,
        engine=job.engine,
        layout=layout_of(job),
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        global_batch_size=job.global_batch_size,
        tokens=tokens,
        vocab_size=vocab,
        **counts,
        memory=memory,
        storage=storage,
        duration=duration,
        epochs=epochs,
        measured=measured,
        objections=tuple(objections),
        notes=tuple(notes(job, memory, storage, duration, epochs)),
    )


def _counts(job: Job, rules: Rules, vocab_size: int | None) -> dict[str, int | None]:
    """Parameters and FLOPs, each None while the vocabulary is unknown."""
    if not vocab_size:
        return dict.fromkeys(("padded_vocab_size", "parameters", "engine_parameters", "model_flops_per_token", "hardware_flops_per_token"))
    padded = padded_vocab_size(vocab_size, job.model.make_vocab_size_divisible_by, job.parallelism.tensor_model_parallel_size)
    return {
        "padded_vocab_size": padded,
        "parameters": parameters_of(job.model, vocab_size),
        "engine_parameters": parameters_of(job.model, padded if rules.pads_weights else vocab_size),
        "model_flops_per_token": model_flops_per_token_of(job.model, vocab_size),
        "hardware_flops_per_token": hardware_flops_per_token_of(job.model, vocab_size, job.training, native=rules.states is None),
    }


def _duration(job: Job, counts: dict[str, int | None], tokens: int, storage: Storage | None, measured: Measured | None) -> Duration | None:
    """At the speed of a run of the same layout, else at the assumed one."""
    model_flops, hardware = counts["model_flops_per_token"], counts["hardware_flops_per_token"]
    if not model_flops or not hardware:
        return None
    speed = measured_speed(job, measured, model_flops) if measured else None
    speed = speed or assumed_speed(job, model_flops, hardware, layout_of(job).bubble_fraction)
    return duration_of(job, speed, tokens, storage.write_seconds if storage else None) if speed else None
