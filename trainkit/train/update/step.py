"""One optimizer step: gradients of a global batch, one agreement of all ranks, one update.
Nothing in it waits for the device.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Job, Model
from trainkit.train.metrics.readback import to_device
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.batch import Batch
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.parallel import context_parallel, data_parallel
from trainkit.train.parallel.data_parallel import COMPUTE
from trainkit.train.parallel.initialize import STACKED
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import ModelChunk, Pipeline
from trainkit.train.parallel.shards import ShardedParameter, Shards, model_tensors, shards_of
from trainkit.train.torch_compat import local_part, seed_generators
from trainkit.train.update import replicas
from trainkit.train.update.build import LAST, ModelParts, expected
from trainkit.train.update.expert_loads import hold_loads, move_biases, take_loads
from trainkit.train.update.loss_guard import LossGuard
from trainkit.train.update.loss_scale import STATE as SCALE_STATE, LossScale
from trainkit.train.update.muon import Matrices
from trainkit.train.update.optimizer import UPDATES, Optimizer, divisor
from trainkit.train.update.schedule import learning_rates

LOADS = "expert_loads"  # of the step before, in a checkpoint
AGREED = 7  # numbers of a step that all ranks sum up, before the loads of experts


class StepValues(NamedTuple):
    """What a step was, as numbers of one vector in this order.

    Args:
        loss: mean cross-entropy of the global batch, nats per token.
        norm: gradient norm before clipping, loss scale taken out.
        rate: learning rate.
        scale: loss scale the step was taken with.
        checksum: sum over all samples' tokens.
        stops: ranks that were asked to stop.
        overflow, nan, spike: 1.0 where the guard found that; each leaves the weights as they were.
        skipped_in_a_row: steps that nan, spike or a fixed scale have skipped one after another.
        mtp_loss: mean cross-entropy of what predicts one token more; 0 where nothing does.
    """

    loss: float
    norm: float
    rate: float
    scale: float
    checksum: float
    stops: float
    overflow: float
    nan: float
    spike: float
    skipped_in_a_row: float
    mtp_loss: float


def dropout_seed(seed: int, position: int, part: int) -> int:
    """Where random numbers begin for a micro-batch, whose first sample has this position, in a
    part of the model. Hashed, for torch's CPU generator takes the low 32 bits of a seed alone."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}:{position}:{part}".encode(), digest_size=8).digest(), "little"
    )


def _groups_of_matrices(
    model: Model, whole: Mapping[str, ShardedParameter], mesh: Mesh
) -> list[Matrices]:
    """Those of experts may lie on other ranks than the others."""
    dense = dict(whole)
    group = mesh.replica_group()
    if mesh.experts is None:
        return [Matrices(model, dense, group, mesh.place.tensor)]
    stacked = {name: dense.pop(name) for name in whole if name.endswith(STACKED)}
    found = [Matrices(model, dense, group, mesh.place.tensor)]
    return [*found, Matrices(model, stacked, mesh.experts.copy_group)] if stacked else found


class Step:
    """Makes steps.

    Args:
        job: the job.
        parts: what this rank holds of the model.
        mesh: this rank among the others.
        timers: measure what time goes into.
    """

    def __init__(self, job: Job, parts: ModelParts, mesh: Mesh, timers: Timers) -> None:
        self.job = job
        self.model_parts = parts
        self.mesh = mesh
        self.device = mesh.device
        self.timers = timers
        self.parameters = {key: sharded.parameter for key, sharded in parts.parameters.items()}
        matrices: list[Matrices] = []
        if UPDATES[job.training.optimizer].of_matrices:
            whole = {
                key: sharded
                for key, sharded in parts.parameters.items()
                if role_of(key, len(sharded.layout.shape)) == "matrix"
            }
            matrices = _groups_of_matrices(job.model, whole, mesh)
        self.optimizer = Optimizer(
            self.parameters, job.training, parts.kernels, matrices, job.model.width_factor
        )
        self.scale = LossScale(job.training, self.device)
        self.guard = LossGuard(job.training, self.device)
        self.rates = learning_rates(job.training, self.device)
        # of the step before, where losses balance the loads of global batches
        self.loads: Tensor | None = None
        moe = job.model.moe
        if moe is not None and moe.router_load_balancing_type == "global_aux_loss":
            self.loads = hold_loads(parts.modules, job.model, self.device)
        self.random = job.model.hidden_dropout > 0 or job.model.attention_dropout > 0
        # one rank has no other to share with
        if mesh.degrees.data_context > 1:
            self.zero_stage = job.parallelism.zero_stage
        else:
            self.zero_stage = 1
        # weights stay gathered: the update's kernel writes them as the model computes with them
        alone = mesh.degrees.data_context == mesh.degrees.pipeline == 1
        self.keeps = alone and self.optimizer.writes_copies
        self.pipeline: Pipeline | None = None
        if mesh.degrees.pipeline > 1:
            dtype = COMPUTE[job.training.precision] or next(iter(self.parameters.values())).dtype
            self.pipeline = Pipeline(
                job, mesh, cast(list[ModelChunk], parts.modules), timers, dtype, self._seed
            )

    def run(
        self,
        batches: Iterable[Batch],
        samples: int,
        stop: bool,
        before_update: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take one step.

        Args:
            batches: this rank's micro-batches of the global batch.
            samples: samples of the global batch.
            stop: this rank was asked to stop.
            before_update: called when all gradients are there and weights and moments are still as
                they were.

        Returns StepValues as an fp64 vector on the device, the same on all ranks, and after them
        the loads of all experts, layer after layer.
        """
        entropy, tokens, checksum = self.backward(batches, samples)
        with self.timers("communication"):
            parts = self.model_parts
            square = replicas.squared_norm(parts.parameters, self.mesh, parts.kernels)
            # In fp64 the checksums' sum is exact up to 2**21 samples a step.
            local = to_device(torch.tensor([checksum, stop], dtype=torch.float64), self.device)
            sums = torch.stack([entropy, tokens.double(), square])
            agreed = torch.cat([sums, local, *self.take_counts()])
            dist.all_reduce(agreed)
        before_update()
        with self.timers("optimizer"):
            return self._update(agreed, samples)

    def backward(self, batches: Iterable[Batch], samples: int) -> tuple[Tensor, Tensor, int]:
        """Gradients of scale * (sum of losses) / (samples * S), summed over all ranks.

        Returns (cross-entropy, labelled tokens, checksum), which all ranks' sums are to be made
        of: what several ranks know alike, one of them adds.
        """
        t = self.job.training
        batches = self._own(batches)
        count = samples // (t.micro_batch_size * self.mesh.degrees.data)
        scale = self.loss_factor(samples)
        if self.pipeline is not None:
            with self.timers("data"):
                read = list(islice(batches, count))
            entropy, tokens = self.pipeline.run(read, learning=True, z_loss=t.z_loss, scale=scale)
            checksum = sum(batch.checksum for batch in read)
        else:
            entropy, tokens, checksum = self._accumulate(batches, count, scale)
        with self.timers("communication"):
            replicas.add_up(self.model_parts.parameters, self.mesh)
        place = self.mesh.place
        reports = place.tensor == 0  # context-parallel ranks have tokens of their own
        first = reports and place.pipeline == self.mesh.context.rank == 0
        return entropy * reports, tokens * reports, checksum * first

    def take_counts(self) -> list[Tensor]:
        """What modules have counted since this was last asked, fp64, which all ranks' sums are to
        be made of: (cross-entropy, labelled tokens) of what predicts one token more; the loads of
        experts."""
        modules = self.model_parts.modules
        found = [torch.zeros(2, dtype=torch.float64, device=self.device)]
        for module in modules:
            if module.mtp is not None and (sums := module.mtp.take()) is not None:
                found = [sums * (self.mesh.place.tensor == 0)]
        if self.job.model.moe is not None:
            found.append(take_loads(modules, self.job.model, self.device))
        return found

    def _own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's tokens of its micro-batches."""
        return (context_parallel.own_tokens(batch, self.mesh.context) for batch in batches)

    def _accumulate(
        self, batches: Iterable[Batch], count: int, scale: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """`backward` without a pipeline: one micro-batch after another."""
        entropy = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        checksum = 0
        rest = iter(batches)
        for m in range(count):
            with self.timers("data"):
                batch = next(rest)
            losses = self.forward(batch, scale, last=m + 1 == count)
            with self.timers("backward"):
                losses.objective.backward()  # type: ignore[no-untyped-call]
            entropy += losses.cross_entropy
            tokens += losses.tokens
            checksum += batch.checksum
        return entropy, tokens, checksum

    def forward(self, batch: Batch, scale: Tensor, *, last: bool) -> Losses:
        """One micro-batch of this rank's own tokens, without a pipeline; its objective, times
        `scale`, is there to call backward on. `last`: of those whose gradients are summed."""
        (module,) = self.model_parts.modules
        (unit,) = self.model_parts.units
        self._seed(batch, 0)
        data_parallel.prepare_backward(unit, last=last, stage=self.zero_stage, keeps=self.keeps)
        labels = Labels(batch.labels_BS, self.job.training.z_loss, scale)
        with self.timers("forward"):
            losses: Losses = module(
                batch.tokens_BS, labels, positions_BS=batch.positions_BS, documents=batch.documents
            )
        return losses

    def loss_factor(self, samples: int) -> Tensor:
        """What the loss of a token is multiplied with, in a global batch of so many samples."""
        return self.scale.scale.double() / (samples * self.job.model.seq_length)

    def _seed(self, batch: Batch, chunk: int) -> None:
        """Seed dropout by position in the order of samples: a resumed run drops the same. Chunks
        of the model draw different numbers, and so do the ranks of a tensor-parallel group where
        each has its own tokens; where they hold the same activations they draw the same. Those of
        a context-parallel group have their own tokens always."""
        if not self.random:
            return
        group = self.mesh.tensor
        context = self.mesh.context
        part = chunk * group.size + (group.rank if group.sequence else 0)
        part = part * context.size + context.rank
        seed_generators(dropout_seed(self.job.training.seed, batch.position, part))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """(cross-entropy, labelled tokens) of these micro-batches, fp64 (2,), to be summed over
        all ranks. The modules must be in the state of evaluation."""
        reports = self.mesh.place.tensor == 0
        batches = self._own(batches)
        if self.pipeline is not None:
            entropy, tokens = self.pipeline.run(list(batches), learning=False)
            return torch.stack([entropy, tokens.double()]) * reports
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        (module,) = self.model_parts.modules
        for batch in batches:
            losses: Losses = module(
                batch.tokens_BS,
                Labels(batch.labels_BS),
                positions_BS=batch.positions_BS,
                documents=batch.documents,
            )
            sums += torch.stack([losses.cross_entropy, losses.tokens.double()])
        return sums * reports

    def _update(self, agreed: Tensor, samples: int) -> Tensor:
        """Judge the gradients and apply them."""
        t = self.job.training
        entropy, tokens, square, checksum, stops, further, predicted = agreed[:AGREED].unbind()
        loads = agreed[AGREED:]
        # where labels are masked, the mean is over those that are left
        share = tokens.clamp(min=1) / (samples * self.job.model.seq_length)
        loss = entropy / tokens.clamp(min=1)
        norm = square.sqrt() / share
        scale = self.scale.scale
        verdict = self.guard.judge(loss, norm, self.scale.may_overflow)
        rate = self.rates.take(self.optimizer.steps)  # skipped steps leave the rate where it is
        copies = dict(self.model_parts.modules[0].named_parameters()) if self.keeps else {}
        self.optimizer.step(rate, divisor(norm, t.clip_grad, scale) * share, verdict.skip, copies)
        self.optimizer.zero_grad()
        if self.job.model.moe is not None:
            move_biases(self.model_parts.modules, self.job.model, loads, verdict.skip)
        if self.loads is not None:
            chosen = loads.view(self.job.model.blocks, -1)[:, :-1].flatten()
            self.loads.copy_(torch.where(verdict.skip > 0, self.loads, chosen))
        values = [
            loss,
            norm / scale,
            rate,
            scale,
            checksum,
            stops,
            *verdict[1:],
            self.guard.skipped_in_a_row,
            further / predicted.clamp(min=1),
        ]
        values = [value.double() for value in values]  # copies: what follows changes some in place
        # at the lowest scale this only restarts the count of good steps
        self.scale.update(verdict.overflow | verdict.nan)
        return torch.cat([torch.stack(values), loads])

    def tensors(self) -> dict[str, Shards]:
        """What a checkpoint holds, by name, as far as it is here; reading into it is loading. Of
        two copies on this rank it is the first; see `after_loading`."""
        parameters = self.model_parts.parameters
        found = model_tensors(parameters)
        for key, tensor in self.optimizer.state_tensors().items():
            moment, _, name = key.partition(".")
            if name in parameters and parameters[name].name == name:
                found[f"optimizer.{moment}.{name}"] = shards_of(parameters[name], tensor)
        if self.loads is not None:
            found[LOADS] = Shards({(0,): self.loads}, tuple(self.loads.shape), self.loads.dtype)
        return found

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that a checkpoint holds, of all ranks."""
        found = expected(self.model_parts, self.job.training)
        return found if self.loads is None else {**found, LOADS: tuple(self.loads.shape)}

    def gradients(self) -> dict[str, Shards]:
        """This rank's part of all gradients after `backward`, by name; scaled as they are."""
        parameters = {h.name: h for h in reversed([*self.model_parts.parameters.values()])}
        return {
            name: shards_of(h, h.parameter.grad)
            for name, h in parameters.items()
            if h.parameter.grad is not None
        }

    @torch.no_grad()
    def after_loading(self) -> None:
        """Make second copies of tied weights equal to the first, with their state: tensors were
        read into the first."""
        self.model_parts.release()
        held = {**self.parameters, **self.optimizer.state_tensors()}
        for name, tensor in held.items():
            if name.endswith(LAST):
                local_part(tensor).copy_(local_part(held[name.removesuffix(LAST)]))

    def state(self) -> dict[str, int | float]:
        """What else the next step depends on; waits for the device."""
        return {
            "optimizer_steps": self.optimizer.applied_steps(),
            **self.scale.state(),
            **self.guard.state(),
        }

    def load_state(self, state: dict[str, int | float | bool]) -> None:
        """Go on from `state()`."""
        self.optimizer.set_steps(int(state["optimizer_steps"]))
        self.scale.load({key: state[key] for key in SCALE_STATE if key in state})
        self.guard.load(state)
