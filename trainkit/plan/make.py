"""What a job will need, worked out before anything runs: pure functions, every objection at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.base.forms import document
from trainkit.jobs.schema import Job, Model

CHECKPOINT_BYTES_PER_PARAMETER = 12  # native engine: fp32 weight and the two moments of Adam


@dataclass(frozen=True)
class Objection:
    """One reason why the job cannot run as it is asked for."""

    code: str
    key: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The plan of a job. `parameters` and what follows from it are None while the vocabulary is unknown."""

    job: str
    world_size: int
    data_parallel_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    tokens: int
    vocab_size: int | None
    parameters: int | None
    model_flops_per_token: int | None
    checkpoint_bytes: int | None
    objections: tuple[Objection, ...]

    @property
    def feasible(self) -> bool:
        return not self.objections

    def to_json(self) -> dict[str, Any]:
        """The form plan/1."""
        objections = [vars(o) for o in self.objections]
        return document("plan/1", **{**vars(self), "feasible": self.feasible, "objections": objections})


def parameters_of(model: Model, vocab_size: int) -> int:
    """Parameters of the gpt family: N = L(4h^2 + 2hf + 9h + f) + Vh + s_max h + 2h, with a head of Vh more when untied.

    With f = 4h this is L(12h^2 + 13h) + Vh + s_max h + 2h: the published L(12h^2 + 13h) + Vh + s_max h (Narayanan et al. 2021,
    arXiv:2104.04473, eq. 2) and the final LayerNorm's 2h.
    """
    layers, h = model.num_layers, model.hidden_size
    f = model.ffn_hidden_size or 4 * h
    positions = model.max_position_embeddings or model.seq_length
    heads = 2 if model.untie_embeddings_and_output_weights else 1
    return layers * (4 * h * h + 2 * h * f + 9 * h + f) + heads * vocab_size * h + positions * h + 2 * h


def model_flops_per_token_of(model: Model, vocab_size: int) -> int:
    """Matmul FLOPs of forward and backward per token, attention counted causally: 3 (L (8h^2 + 4hf + 2sh) + 2hV).

    Backward is twice forward; elementwise work and recomputation are not counted.
    """
    layers, h = model.num_layers, model.hidden_size
    f = model.ffn_hidden_size or 4 * h
    return 3 * (layers * (8 * h * h + 4 * h * f + 2 * model.seq_length * h) + 2 * h * vocab_size)


def _objections(job: Job) -> list[Objection]:
    found = []
    t, dp = job.training, job.data_parallel_size
    quantum = t.micro_batch_size * dp
    if t.global_batch_size is not None and t.global_batch_size % quantum:
        below = t.global_batch_size // quantum * quantum
        near = " or ".join(str(b) for b in (below, below + quantum) if b)
        message = f"global_batch_size {t.global_batch_size} does not divide by micro_batch_size {t.micro_batch_size} x data-parallel size {dp}; nearest: {near}"
        found.append(Objection("batch-not-divisible", "training.global_batch_size", message))
    if job.cluster.device == "cuda" and job.ranks_per_node > job.cluster.gpus_per_node:
        message = f"{job.ranks_per_node} ranks a node for {job.cluster.gpus_per_node} GPUs (cluster.gpus_per_node)"
        found.append(Objection("more-ranks-than-gpus", "cluster.ranks_per_node", message))
    return found


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
        tokens=job.training.train_iters * job.global_batch_size * job.model.seq_length,
        vocab_size=vocab,
        parameters=parameters,
        model_flops_per_token=model_flops_per_token_of(job.model, vocab) if vocab else None,
        checkpoint_bytes=CHECKPOINT_BYTES_PER_PARAMETER * parameters if parameters else None,
        objections=tuple(_objections(job)),
    )
