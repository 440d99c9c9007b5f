"""From a job to this rank's part of the model, in the one order that works: cut, split, wrap,
shard, and only then memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.optimizers import kept_of, role_of
from trainkit.jobs.schema import Job, Training
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel import (
    context_parallel,
    data_parallel,
    expert_parallel,
    low_precision,
    tensor_parallel,
)
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import ModelChunk, chunks_on, chunks_per_stage
from trainkit.train.parallel.recompute import wrap_blocks
from trainkit.train.parallel.shards import ShardedParameter, saved_tensors, sharded_parameters
from trainkit.train.ready_graphs import ReadyGraphs
from trainkit.train.update.schedule import batch_sizes

# after the name of tied weights: the last chunk's copy of them on the rank that has the first chunk
# too
LAST = "@last"


@dataclass(frozen=True)
class ModelParts:
    """What one rank holds of the model.

    Args:
        modules: the model itself, or the chunks of this pipeline stage in the model's order.
        parameters: every parameter by its name; a second copy of tied weights on the same rank is
            called NAME + LAST.
        shapes: of all the model's parameters, wherever they are.
        kernels: what the model and its update are computed with.
    """

    modules: list[Transformer]
    parameters: dict[str, ShardedParameter]
    shapes: dict[str, tuple[int, ...]]
    kernels: Kernels = REFERENCE

    @property
    def units(self) -> Iterator[FSDPModule]:
        """The modules as fully_shard left them."""
        for module in self.modules:
            assert isinstance(module, FSDPModule)
            yield module

    def train(self, mode: bool = True) -> None:
        """As nn.Module's."""
        for module in self.modules:
            module.train(mode)

    def release(self) -> None:
        """Free what a forward without a backward left gathered."""
        for module in self.modules:
            data_parallel.release(module)


def build_model_parts(
    job: Job,
    mesh: Mesh,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = REFERENCE,
    graphs: ReadyGraphs | None = None,
) -> ModelParts:
    """This rank's part of the model, on its device, split and sharded as the job says; its
    weights hold anything.

    Args:
        vocab: rows of the embedding.
        dtype: of weights at rest: wider than fp32 for tests that want it.
        kernels: what the model computes with.
        graphs: those compiled before; None: there are none.
    """
    p = job.parallelism
    t = job.training
    whole = build_on_meta(job.model, vocab, kernels)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(whole).items()}
    modules: list[Transformer] = [whole]
    if mesh.degrees.pipeline > 1:
        with torch.device("meta"):
            count = mesh.degrees.pipeline * chunks_per_stage(p)
            modules = [
                ModelChunk(job.model, vocab, number, count, kernels)
                for number in chunks_on(mesh.place.pipeline, p)
            ]
    sums = mesh.degrees.data_context > 1 or max(batch_sizes(job)) > t.micro_batch_size
    parameters: dict[str, ShardedParameter] = {}
    for module in modules:
        module.to(dtype)
        tensor_parallel.apply(module, vocab, mesh.tensor, kernels)
        if mesh.experts is not None:
            expert_parallel.apply(module, mesh.experts.group, mesh.tensor, kernels)
        context_parallel.apply(module, mesh.context, p.cp_comm_type)
        low_precision.apply(module, t, mesh.tensor, mesh.context)
        wrap_blocks(module, job.model, t, graphs)
        layouts = {
            name: h.layout for name, h in sharded_parameters(module, mesh.degrees.tensor).items()
        }
        copies = dict.fromkeys(layouts, mesh.degrees.replicate)
        apart = None
        if mesh.experts is not None:
            experts = expert_parallel.parameters_of(module)
            copies |= dict.fromkeys(experts, mesh.degrees.expert_copies[0])
            apart = (frozenset(experts.values()), mesh.experts.data)
        data_parallel.shard(
            module, mesh.data, t.precision, stage=p.zero_stage, sums=sums, apart=apart
        )
        module.to_empty(device=mesh.device)
        second = isinstance(module, ModelChunk) and not module.first
        for name, parameter in saved_tensors(module).items():
            tied = second and name == "embed_tokens.weight"
            parameters[name + LAST if name in parameters else name] = ShardedParameter(
                name, parameter, layouts[name], counts=not tied, copies=copies[name]
            )
    return ModelParts(modules, parameters, shapes, kernels)


def expected(parts: ModelParts, training: Training) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint: "model.NAME", and "optimizer.KEPT.NAME" of all that
    the optimizer keeps."""
    found = {f"model.{name}": shape for name, shape in parts.shapes.items()}
    for name, shape in parts.shapes.items():
        for kept in kept_of(training, role_of(name, len(shape))):
            found[f"optimizer.{kept}.{name}"] = shape
    return found
