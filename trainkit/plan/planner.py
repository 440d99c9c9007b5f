"""What a job will need, worked out before anything runs: pure functions, every objection at
once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, raise_problems
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import (
    active_parameters_of,
    hardware_flops_per_token_of,
    model_flops_per_token_of,
    parameters_of,
)
from trainkit.plan.batch import consumed_after
from trainkit.plan.checks import checks
from trainkit.plan.duration import (
    COPY_GIB_PER_SECOND,
    FORWARD,
    Costs,
    Duration,
    Epochs,
    Speed,
    duration_of,
    epochs_of,
)
from trainkit.plan.host import HostMemory
from trainkit.plan.layout import Layout, layout_of, padded_vocab_size
from trainkit.plan.limits import (
    Sizes,
    memory_objections,
    sample_objections,
    storage_objections,
    time_objections,
)
from trainkit.plan.measured import Measured, calibrated_speed, measured_excess, measured_speed
from trainkit.plan.memory import Memory
from trainkit.plan.mixtures import PlannedRead, planned_reads, samples_of
from trainkit.plan.notes import not_known, notes
from trainkit.plan.objection import Objection, describe_changes, try_change
from trainkit.plan.rules import NATIVE, Rules
from trainkit.plan.storage import GIB, Storage, storage_of, writes_checkpoints
from trainkit.plan.time.of_job import estimate_step, host_estimate, predicted_speed

__all__ = ["Objection", "Plan", "make_plan", "refuse_infeasible"]
# The fewest ids and the most of a vocabulary that is not known: the bytes and an end of document,
# and the largest published (Gemma's).
VOCABULARIES = (257, 262_144)


@dataclass(frozen=True)
class PreparedData:
    """What is known of this machine and of data that is there already.

    Args:
        vocab_size: ids of the prepared tokenizer: a BPE trained on little text stays below what its
            table asks for; or of the files that it will be made of.
        dataset_tokens: tokens of the prepared dataset, or of pairs that are here.
        text_bytes: of plain files that are here and were not prepared.
        free_bytes: what is free where a cluster without file systems of its own keeps runs.
        host_bytes: memory of this machine, where the ranks run on it.
        cores: that processes may use on this machine, where the ranks run on them.
        tokens: of every dataset that training reads and that is prepared or here, by name, where
            the plan says what is read when.
    """

    vocab_size: int | None = None
    dataset_tokens: int | None = None
    text_bytes: int | None = None
    free_bytes: int | None = None
    host_bytes: int | None = None
    cores: int | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The plan of a job. `parameters` and what follows from it are None while the vocabulary is
    unknown; then `between` has the plans for the smallest and the largest one.

    `not_known` is what the plan could not look at, though it decides whether the job can run.

    `global_batch_size` is that of a step after the ramp-up, if there is one; `tokens` counts the
    smaller batches before. `parameters` are the native model's; `engine_parameters` count the
    padded vocabulary where the engine keeps it; `active_parameters` those that a token meets, the
    embedding among them, None of a model without experts. `duration` is None where no speed is
    known or assumed.
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
    active_parameters: int | None
    model_flops_per_token: int | None
    hardware_flops_per_token: int | None
    memory: Memory | None
    host_memory: HostMemory | None
    storage: Storage | None
    duration: Duration | None
    epochs: Epochs | None
    measured: Measured | None
    objections: tuple[Objection, ...]
    not_known: tuple[Objection, ...]
    notes: tuple[Objection, ...]
    between: tuple[Plan, Plan] | None = None
    reads: Sequence[PlannedRead] = ()

    @property
    def feasible(self) -> bool | None:
        """None: nothing that was looked at speaks against it, but `not_known` was not."""
        if self.objections:
            return False
        return None if self.not_known else True

    @property
    def exit(self) -> Exit:
        """How a command ends that asks for the plan."""
        return {True: Exit.DONE, False: Exit.PLAN, None: Exit.NOT_KNOWN}[self.feasible]

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
        """Of the whole run: steps, evaluations, checkpoints, starts, what failures repeat. None
        where no speed is known."""
        return self.duration.days if self.duration else None

    def to_json(self) -> dict[str, Any]:
        """The document plan/1."""
        sizes = (
            "vocab_size",
            "padded_vocab_size",
            "parameters",
            "engine_parameters",
            *(("active_parameters",) if self.active_parameters else ()),
            "model_flops_per_token",
            "hardware_flops_per_token",
            "checkpoint_bytes",
        )
        batch = (
            "world_size",
            "data_parallel_size",
            "gradient_accumulation_steps",
            "global_batch_size",
            "tokens",
        )
        parts = {
            key: getattr(self, key)
            for key in ("memory", "host_memory", "storage", "duration", "epochs", "measured")
        }
        return document(
            "plan/1",
            **{key: getattr(self, key) for key in ("job", "engine", "feasible", *batch, *sizes)},
            layers_by_stage=list(self.layout.layers_by_stage),
            bubble_fraction=self.layout.bubble_fraction,
            days=self.days,
            **{key: part.to_json() if part else None for key, part in parts.items()},
            objections=[objection.to_json() for objection in self.objections],
            not_known=[entry.to_json() for entry in self.not_known],
            between=[plan.to_json() for plan in self.between] if self.between else None,
            notes=[note.to_json() for note in self.notes],
            **({"reads": [read.to_json() for read in self.reads]} if self.reads else {}),
        )


def refuse_infeasible(plan: Plan) -> Plan:
    """The plan itself. Raises ConfigError (exit 4) with every objection."""
    raise_problems((each.problem(plan.job) for each in plan.objections), Exit.PLAN)
    return plan


def _with_remedies(job: Job, sizes: Sizes) -> Iterator[Objection]:
    """Objections of `checks`, each with the changes that remove it and raise no other, nor one
    of memory."""
    found = list(checks(job, sizes.rules, sizes.tokenizer_size))
    codes = {objection.code for objection in found}
    fitted = sizes.fits(job)
    for objection in found:
        others = codes - {objection.code}
        kept = [
            change
            for change in objection.changes
            if (tried := try_change(job, change)) is not None
            and sizes.codes(tried) <= others
            and (not fitted or sizes.fits(tried))
        ]
        way_out = describe_changes(kept, objection.key)
        message = f"{objection.message}; {way_out}" if way_out else objection.message
        yield replace(objection, message=message, changes=tuple(kept))


def _refuse_other_rules(job: Job, rules: Rules) -> None:
    if rules.engine != job.engine:
        raise ValueError(
            f"job {job.name} is for engine {job.engine}, these are the rules of {rules.engine}"
        )


def make_plan(
    job: Job,
    vocab_size: int | None = None,
    *,
    rules: Rules = NATIVE,
    prepared: PreparedData | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Plan `job`. Raises ValueError for the rules of another engine.

    Args:
        job: the job, complete.
        vocab_size: that of its prepared tokenizer, as `prepared` may say too.
        rules: those of the job's engine.
        prepared: what else is there already.
        measured: what the last run of this job on this cluster took.
    """
    _refuse_other_rules(job, rules)
    known = prepared or PreparedData()
    trained = vocab_size or known.vocab_size
    vocab = _vocab_size(job, trained)
    if vocab is None:
        plans = (
            make_plan(job, ids, rules=rules, prepared=known, measured=measured)
            for ids in VOCABULARIES
        )
        return _between(*plans)
    tokens = consumed_after(job, job.training.train_iters) * job.model.seq_length
    of_dataset = samples_of(job, job.dataset) * job.model.seq_length
    epochs = epochs_of(job.dataset, of_dataset, known.dataset_tokens, known.text_bytes)
    sizes = _sizes(job, Sizes(rules, vocab, trained, known.host_bytes), measured)
    memory = sizes.memory(job)
    host = sizes.host(job, memory)
    counts = _counts(job, rules, vocab)
    speed = _speed(job, rules, counts, known.cores, measured)
    job = _saved_by_steps(job, rules, speed)
    storage = _storage(job, rules, vocab, counts, known)
    costs = _costs(job, rules, counts, storage, memory)
    duration = duration_of(job, speed, tokens, costs) if speed else None
    limits = _limit_objections(job, known, sizes, memory, host, storage, duration)
    return Plan(
        job=job.name,
        engine=job.engine,
        layout=layout_of(job),
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        global_batch_size=job.global_batch_size,
        tokens=tokens,
        vocab_size=vocab,
        **vars(counts),
        memory=memory,
        host_memory=host,
        storage=storage,
        duration=duration,
        epochs=epochs,
        measured=measured,
        objections=(*_with_remedies(job, sizes), *limits),
        not_known=tuple(not_known(job, rules, memory, host, duration)),
        notes=tuple(notes(job, sizes, memory, storage, duration, epochs)),
        reads=_reads(job, known),
    )


def _sizes(job: Job, sizes: Sizes, measured: Measured | None) -> Sizes:
    """`sizes` with what a run took beyond its plan."""
    if measured is None:
        return sizes
    return replace(sizes, excess=measured_excess(measured, sizes.memory(job)))


def _between(few: Plan, many: Plan) -> Plan:
    """The plan where the vocabulary is not known: what speaks against the fewest ids speaks
    against the job, and what only the most ids raise is not known.

    Args:
        few: the plan with the fewest ids that a vocabulary has.
        many: with the most.
    """
    codes = {objection.code for objection in few.objections}
    open_ = [each for each in many.objections if each.code not in codes]
    message = (
        f"the vocabulary, which the tokenizer's files decide: with {many.vocab_size:,} ids"
        f" {'; '.join(each.message for each in open_) or 'nothing speaks against it'}"
    )
    sizes = Objection("vocabulary-unknown", "model.vocab_size", message)
    return replace(
        few,
        vocab_size=None,
        padded_vocab_size=None,
        parameters=None,
        engine_parameters=None,
        active_parameters=None,
        model_flops_per_token=None,
        hardware_flops_per_token=None,
        memory=None,
        host_memory=None,
        storage=None,
        duration=None,
        objections=tuple(
            each
            if each in many.objections
            else replace(each, message=f"with only {few.vocab_size:,} ids {each.message}")
            for each in few.objections
        ),
        not_known=(sizes, *few.not_known),
        between=(few, many),
    )


def _reads(job: Job, known: PreparedData) -> Sequence[PlannedRead]:
    """What is read when; nothing where a blend's `max_epochs` do not allow it."""
    with contextlib.suppress(ConfigError):  # `_epoch_objections` says it
        return planned_reads(job, known.tokens)
    return ()


def _epoch_objections(job: Job, known: PreparedData) -> Iterator[Objection]:
    """A blend of which every part would be read more often than its `max_epochs`."""
    try:
        planned_reads(job, known.tokens)
    except ConfigError as error:
        said = error.list[0]
        message = f"{said.message}; {said.hint}"
        yield Objection("max-epochs", "training.train_iters", message)


def _limit_objections(
    job: Job,
    known: PreparedData,
    sizes: Sizes,
    memory: Memory,
    host: HostMemory,
    storage: Storage | None,
    duration: Duration | None,
) -> Iterator[Objection]:
    """What the job needs more of than there is: memory, room on disk, time, data."""
    yield from memory_objections(job, sizes, memory, host)
    if storage:
        yield from storage_objections(job, storage, sizes.rules)
    if duration:
        yield from time_objections(job, duration, storage)
    if sizes.rules.states is None:
        yield from sample_objections(job, known.dataset_tokens or known.text_bytes)
    yield from _epoch_objections(job, known)


@dataclass(frozen=True)
class _ModelCounts:
    """Parameters and FLOPs. Fields as in Plan."""

    padded_vocab_size: int
    parameters: int
    engine_parameters: int
    active_parameters: int | None
    model_flops_per_token: int
    hardware_flops_per_token: int


def _vocab_size(job: Job, trained: int | None) -> int | None:
    """As the model table says, else of the trained tokenizer, else of the tokenizer's table."""
    tokenizer = job.dataset.tokenizer
    return job.model.vocab_size or trained or (tokenizer.vocab_size if tokenizer else None)


def _counts(job: Job, rules: Rules, vocab_size: int) -> _ModelCounts:
    padded = padded_vocab_size(
        vocab_size,
        job.model.make_vocab_size_divisible_by,
        job.parallelism.tensor_model_parallel_size,
    )
    return _ModelCounts(
        padded_vocab_size=padded,
        parameters=parameters_of(job.model, vocab_size),
        engine_parameters=parameters_of(job.model, rules.vocab_rows(vocab_size, padded)),
        active_parameters=active_parameters_of(job.model, vocab_size) if job.model.moe else None,
        model_flops_per_token=model_flops_per_token_of(job.model, vocab_size),
        hardware_flops_per_token=hardware_flops_per_token_of(
            job.model, vocab_size, job.training, native=rules.states is None
        ),
    )


def _storage(
    job: Job, rules: Rules, vocab_size: int, counts: _ModelCounts, known: PreparedData
) -> Storage | None:
    """What is written; None where nothing is."""
    if not writes_checkpoints(job, rules):
        return None
    rows = rules.vocab_rows(vocab_size, counts.padded_vocab_size)
    return storage_of(job, rules, rows, known.free_bytes)


def _costs(
    job: Job,
    rules: Rules,
    counts: _ModelCounts,
    storage: Storage | None,
    memory: Memory,
) -> Costs:
    """What is done besides steps."""
    held = max(rank.parameter_bytes + rank.optimizer_bytes for rank in memory.stages)
    write = storage.write_seconds if storage else None
    if not writes_checkpoints(job, rules):
        write = 0.0
    return Costs(
        write=write,
        read=storage.read_seconds if storage else None,
        copy=held / (COPY_GIB_PER_SECOND * GIB) if job.checkpoint.save_async else 0.0,
        forward=FORWARD * counts.model_flops_per_token / counts.hardware_flops_per_token,
        first_evaluation=rules.states is None,
    )


def _speed(
    job: Job, rules: Rules, counts: _ModelCounts, cores: int | None, measured: Measured | None
) -> Speed | None:
    """That of a run of the same layout, else the predicted one: on CPUs once any run was
    measured. None where the layout does not fill the ranks.

    Args:
        job: the job.
        rules: of its engine.
        counts: of the model.
        cores: of this machine, for ranks on its CPUs.
        measured: a run of the job.
    """
    model_flops = counts.model_flops_per_token
    if not layout_of(job).fills_world:
        return None
    speed = measured_speed(job, measured, model_flops) if measured else None
    if speed is None:
        estimate = estimate_step(job, rules, counts.padded_vocab_size)
        if job.cluster.device.kind == "cpu" and measured and measured.calibration:
            estimate = host_estimate(job, counts.padded_vocab_size, cores)
        if estimate:
            speed = predicted_speed(job, estimate, model_flops)
            if measured:
                speed = calibrated_speed(speed, measured)
    return speed


def _saved_by_steps(job: Job, rules: Rules, speed: Speed | None) -> Job:
    """The job with the steps between its checkpoints, where the engine saves by the clock."""
    training = job.training
    if not rules.save_seconds or training.save_interval is not None or speed is None:
        return job
    step = job.global_batch_size * job.model.seq_length / speed.tokens_per_second
    every = min(training.train_iters, max(1, math.ceil(rules.save_seconds / step)))
    changed = training.model_copy(update={"save_interval": every})
    return job.model_copy(update={"training": changed})
