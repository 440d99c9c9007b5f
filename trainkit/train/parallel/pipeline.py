"""Pipelines: the model cut into chunks of layers, and torch.distributed.pipelining's schedules
over them.

Every stage reads the same micro-batches, so only activations travel: tokens and labels are where
they are needed.

Shapes: B samples of a micro-batch, S tokens of a sample (with sequence parallelism this rank's
part of them), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.jobs.schema import Job, Model, Parallelism
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.plan.layout import split_layers
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.batch import Batch
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.mesh import Mesh


def chunks_per_stage(parallelism: Parallelism) -> int:
    """Chunks of the model on every stage."""
    if parallelism.pipeline_schedule == "zbv":
        return 2
    return parallelism.virtual_pipeline_model_parallel_size or 1


def chunks_on(stage: int, parallelism: Parallelism) -> tuple[int, ...]:
    """Numbers of the chunks on a stage, in the model's order: round and round, or there and back
    (ZBV: Qi et al. 2024, arXiv:2401.10241, section 6)."""
    stages = parallelism.pipeline_model_parallel_size
    if parallelism.pipeline_schedule == "zbv":
        return stage, 2 * stages - 1 - stage
    return tuple(range(stage, stages * chunks_per_stage(parallelism), stages))


def tied_at(job: Job) -> int | None:
    """The stage that holds the second copy of the embedding, of tied weights or for what predicts
    one token more: the last chunk's, where that is not the first stage too."""
    p = job.parallelism
    twice = job.model.tied or job.model.mtp_num_layers
    if twice and p.pipeline_model_parallel_size > 1 and p.pipeline_schedule != "zbv":
        return p.pipeline_model_parallel_size - 1
    return None


@dataclass
class PipelineState:
    """What the chunks of one rank do now, shared by them.

    Args:
        batches: the micro-batches of this step or evaluation.
        z_loss, scale: of their Labels.
        cross_entropy, tokens: summed by the last chunk.
        seed: called with the micro-batch and the chunk before each forward.
    """

    batches: Sequence[Batch] = ()
    z_loss: float = 0.0
    scale: Tensor | float = 1.0
    cross_entropy: Tensor | float = 0.0
    tokens: Tensor | int = 0
    seed: Callable[[Batch, int], None] = lambda batch, chunk: None


class ModelChunk(Transformer):
    """Consecutive layers of a model, with what comes before them in the first chunk and after
    them in the last. Parameters keep their names; where it needs the embedding too the last chunk
    has a copy.

    Args:
        model, vocab_size: of the whole model.
        number: which chunk, of `count`.
        kernels: what it computes with.
    """

    def __init__(
        self, model: Model, vocab_size: int, number: int, count: int, kernels: Kernels = REFERENCE
    ) -> None:
        super().__init__(model, vocab_size, kernels)
        self.number = number
        self.first = number == 0
        self.last = number == count - 1
        self.work = PipelineState()
        self.micro_batch = 0
        sizes = split_layers(model.num_layers, count)
        start = sum(sizes[:number])
        for name in list(self.layers):
            further = self.last and int(name) >= model.num_layers
            if not (further or start <= int(name) < start + sizes[number]):
                del self.layers[name]
        if not self.first:
            self.embed_positions = None
        if not (self.first or (self.last and (self.head is None or self.mtp is not None))):
            self.embed_tokens = None  # type: ignore[assignment]
        if not self.last:
            self.final_norm, self.head, self.mtp = None, None, None  # type: ignore[assignment]

    def forward(self, x_BSH: Tensor) -> Tensor:  # type: ignore[override]
        """From activations to activations. The first chunk is given nothing of use; the last
        returns the objective, to call backward on."""
        work = self.work
        batch = self.work.batches[self.micro_batch]
        work.seed(batch, self.number)
        positions_BS = batch.positions_BS
        if positions_BS is None:
            positions_BS = torch.arange(batch.tokens_BS.shape[1], device=batch.tokens_BS.device)
        if self.first:
            x_BSH = self.embed(batch.tokens_BS, positions_BS)
        x_BSH = self.transform(x_BSH, positions_BS, batch.documents, objective=work.scale)
        if not self.last:
            return x_BSH
        labels = Labels(batch.labels_BS, work.z_loss, work.scale)
        losses = self.finish(x_BSH, labels, batch.tokens_BS, positions_BS, batch.documents)
        assert isinstance(losses, Losses)
        work.cross_entropy = work.cross_entropy + losses.cross_entropy
        work.tokens = work.tokens + losses.tokens
        # torch joins what the last stage returns; fully_shard warns of a view
        return torch.stack([losses.objective])


class Pipeline:
    """Runs the chunks of this rank by the job's schedule.

    Args:
        job: its parallelism, micro-batch and sequence length.
        chunks: this rank's, in the model's order.
        dtype: of activations between chunks.
        seed: as Work's.
    """

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        chunks: Sequence[ModelChunk],
        timers: Timers,
        dtype: torch.dtype,
        seed: Callable[[Batch, int], None],
    ) -> None:
        self.parallelism = job.parallelism
        self.mesh = mesh
        self.chunks = chunks
        self.timers = timers
        self.dtype = dtype
        self.seed = seed
        parts = mesh.context.size * (mesh.tensor.size if mesh.tensor.sequence else 1)
        tokens = job.model.seq_length // parts
        self.shape = (job.training.micro_batch_size, tokens, job.model.hidden_size)
        self._schedules: dict[tuple[int, bool], Any] = {}

    def _schedule(self, micro_batches: int, learning: bool) -> Any:
        """The schedule of so many micro-batches, with stages of its own: torch prepares one for
        one number."""
        if (found := self._schedules.get((micro_batches, learning))) is not None:
            return found
        # half a second of imports, where there is a pipeline
        from trainkit.train.parallel.pipeline_stage import make_schedule

        shape = (self.shape, self.dtype)
        made = make_schedule(
            self.parallelism,
            self.mesh,
            self.chunks,
            micro_batches,
            self.timers,
            shape,
            learning=learning,
        )
        self._schedules[micro_batches, learning] = made
        return made

    def run(
        self,
        batches: Sequence[Batch],
        *,
        learning: bool,
        z_loss: float = 0.0,
        scale: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Forward, and if `learning` backward, of all micro-batches; (cross-entropy, labelled
        tokens) of them on the last stage, 0 on the others.

        Gradients are reduced over the data-parallel ranks when it returns.
        """
        device = self.mesh.device
        work = PipelineState(
            batches,
            z_loss,
            scale,
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )
        if learning:
            work.seed = self.seed
        for chunk in self.chunks:
            chunk.work = work
        numbers = torch.arange(len(batches))
        given = [numbers] if self.chunks[0].first else []
        schedule = self._schedule(len(batches), learning)
        if learning:
            with self.timers("pipeline"):
                schedule.step(*given, **({"target": numbers} if self.chunks[-1].last else {}))
        else:
            schedule.step(*given)
        assert isinstance(work.cross_entropy, Tensor) and isinstance(work.tokens, Tensor)
        return work.cross_entropy, work.tokens
