"""What a job will need, worked out before anything runs: pure functions, every objection at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.base.forms import document
from trainkit.jobs.schema import Job, Training
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of, parameters_of
from trainkit.plan.batch import batch_sizes, consumed_after

MANY = 4  # batch sizes named in one message


@dataclass(frozen=True)
class Objection:
    """One reason why the job cannot run as it is asked for."""

    code: str
    key: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The plan of a job. `parameters` and what follows from it are None while the vocabulary is unknown.

    `global_batch_size` is that of a step after the ramp-up, if there is one; `tokens` counts the smaller batches before.
    """

    job: str
    world_size: int
    data_parallel_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    tokens: int
    vocab_size: int | None
    parameters: int | None
    model_flops_per_token: int | None
    hardware_flops_per_token: int | None
    checkpoint_bytes: int | None
    objections: tuple[Objection, ...]

    @property
    def feasible(self) -> bool:
        return not self.objections

    def to_json(self) -> dict[str, Any]:
        """The form plan/1."""
        objections = [vars(o) for o in self.objections]
        return document("plan/1", **{**vars(self), "feasible": self.feasible, "objections": objections})


def checkpoint_bytes_per_parameter(training: Training) -> int:
    """The fp32 weight and the fp32 state that the optimizer keeps of it: two moments of Adam, one momentum of SGD."""
    state = 2 if training.optimizer == "adam" else 1 if training.sgd_momentum else 0
    return 4 * (1 + state)


def _batch_objections(job: Job) -> Iterator[Objection]:
    """Every batch that a step may have must divide; of a ramp each size that does not is named."""
    micro, dp = job.training.micro_batch_size, job.data_parallel_size
    quantum = micro * dp
    product = f"micro_batch_size {micro} x data-parallel size {dp}"
    *growing, whole = batch_sizes(job)
    if whole % quantum:
        below = whole // quantum * quantum
        near = " or ".join(str(b) for b in (below, below + quantum) if b)
        yield Objection("batch-not-divisible", "training.global_batch_size", f"global_batch_size {whole} does not divide by {product}; nearest: {near}")
    if wrong := [size for size in growing if size % quantum]:
        sizes = ", ".join(map(str, wrong[:MANY])) + (f" and {len(wrong) - MANY} more" if len(wrong) > MANY else "")
        message = f"rampup_batch_size passes through {sizes}, which {product} does not divide; start and increment must be multiples of {quantum}"
        yield Objection("ramp-not-divisible", "training.rampup_batch_size", message)


def _profile_objections(job: Job) -> Iterator[Objection]:
    """A profile that would never be taken."""
    if job.profile is None:
        return
    if job.profile.start > job.training.train_iters:
        message = f"profile.start {job.profile.start} is beyond train_iters {job.training.train_iters}"
        yield Objection("profile-beyond-end", "profile.start", message)
    if beyond := [rank for rank in job.profile.ranks if rank >= job.world_size]:
        yield Objection("profile-of-no-rank", "profile.ranks", f"profile.ranks {', '.join(map(str, beyond))}: the world has ranks 0 to {job.world_size - 1}")


def _objections(job: Job, tokenizer_size: int | None) -> Iterator[Objection]:
    yield from _batch_objections(job)
    rows = job.model.vocab_size
    if rows and tokenizer_size and tokenizer_size > rows:
        message = f"the prepared tokenizer has {tokenizer_size} ids, model {job.model.name!r} only {rows}"
        yield Objection("vocabulary-too-small", "model.vocab_size", message)
    if job.cluster.device_type == "cuda" and job.ranks_per_node > job.cluster.gpus_per_node:
        message = f"{job.ranks_per_node} ranks a node for {job.cluster.gpus_per_node} GPUs (cluster.gpus_per_node)"
        yield Objection("more-ranks-than-gpus", "cluster.ranks_per_node", message)
    yield from _profile_objections(job)


def make_plan(job: Job, vocab_size: int | None = None) -> Plan:
    """Plan `job`. `vocab_size` is that of its prepared tokenizer: a BPE trained on little text stays below what its table asks for."""
    tokenizer = job.dataset.tokenizer
    vocab = job.model.vocab_size or vocab_size or (tokenizer.vocab_size if tokenizer else None)
    parameters = parameters_of(job.model, vocab) if vocab else None
    return Plan(
        job=job.name,
        world_size=job.world_size,
        data_parallel_size=job.data_parallel_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        global_batch_size=job.global_batch_size,
        tokens=consumed_after(job, job.training.train_iters) * job.model.seq_length,
        vocab_size=vocab,
        parameters=parameters,
        model_flops_per_token=model_flops_per_token_of(job.model, vocab) if vocab else None,
        hardware_flops_per_token=hardware_flops_per_token_of(job.model, vocab, job.training) if vocab else None,
        checkpoint_bytes=checkpoint_bytes_per_parameter(job.training) * parameters if parameters else None,
        objections=tuple(_objections(job, vocab_size)),
    )
