"""One optimizer step: gradients of a global batch, one agreement of all ranks, one update. Nothing in it waits for the device.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.jobs.schema import Job
from trainkit.train import data_parallel
from trainkit.train.data_parallel import World
from trainkit.train.feed import Batch
from trainkit.train.guard import Guard
from trainkit.train.loss import Labels, Losses
from trainkit.train.loss_scale import STATE as SCALE_STATE
from trainkit.train.loss_scale import LossScale
from trainkit.train.optimizer import Optimizer, divisor, local_gradients, squared_norm
from trainkit.train.readback import to_device
from trainkit.train.schedule import learning_rates
from trainkit.train.timers import Timers


class StepValues(NamedTuple):
    """What a step was, as numbers of one vector in this order.

    Args:
        loss: mean cross-entropy of the global batch, nats per token.
        norm: gradient norm before clipping, loss scale taken out.
        rate: learning rate.
        scale: loss scale the step was taken with.
        checksum: sum over all samples' tokens.
        stops: ranks that were told to stop.
        overflow, nan, spike: 1.0 where the guard found that; each leaves the weights as they were.
        skipped_in_a_row: steps that nan or spike have skipped one after another.
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


class Step:
    """Makes steps.

    Args:
        job: the job.
        module: the model, on this rank's device.
        sharded: the same as fully_shard left it.
        world: this rank among the others.
        device: this rank's device.
        timers: told what time goes into.
    """

    def __init__(self, job: Job, module: nn.Module, sharded: FSDPModule, world: World, device: torch.device, timers: Timers) -> None:
        self.job, self.module, self.sharded, self.world, self.device, self.timers = job, module, sharded, world, device, timers
        self.parameters = dict(module.named_parameters())
        self.optimizer = Optimizer(self.parameters, job.training)
        self.scale, self.guard = LossScale(job.training, device), Guard(job.training, device)
        self.rates = learning_rates(job.training, device)
        self.random = job.model.hidden_dropout > 0 or job.model.attention_dropout > 0

    def run(self, batches: Iterable[Batch], samples: int, stop: bool) -> Tensor:
        """Take one step.

        Args:
            batches: this rank's micro-batches of the global batch.
            samples: samples of the global batch.
            stop: this rank was told to stop.

        Returns StepValues as an fp64 vector on the device, the same on all ranks.
        """
        entropy, tokens, checksum = self._backward(batches, samples)
        with self.timers("communication"):
            # In fp64 the checksums' sum is exact up to 2**21 samples a step.
            square = squared_norm(local_gradients(self.parameters.values()))
            told = to_device(torch.tensor([checksum, stop], dtype=torch.float64), self.device)
            agreed = torch.cat([torch.stack([entropy, tokens.double(), square]), told])
            dist.all_reduce(agreed)
        with self.timers("optimizer"):
            return self._update(agreed, samples)

    def _backward(self, batches: Iterable[Batch], samples: int) -> tuple[Tensor, Tensor, int]:
        """Gradients of scale * (sum of losses) / (samples * S), summed over all ranks; returns this rank's (cross-entropy, labelled tokens, checksum)."""
        entropy = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        checksum, t = 0, self.job.training
        count = samples // (t.micro_batch_size * self.world.size)
        scale = self.scale.scale / (samples * self.job.model.seq_length)
        rest = iter(batches)
        for m in range(count):
            with self.timers("data"):
                batch = next(rest)
            if self.random:  # by position alone: a resumed run drops the same
                torch.manual_seed(((t.seed << 32) ^ batch.position) % 2**64)
            data_parallel.prepare_backward(self.sharded, last=m + 1 == count)
            labels = Labels(batch.labels_BS, t.z_loss, scale)
            with self.timers("forward"):
                losses: Losses = self.module(batch.tokens_BS, labels, positions_BS=batch.positions_BS, documents=batch.documents)
            with self.timers("backward"):
                losses.objective.backward()  # type: ignore[no-untyped-call]
            entropy += losses.cross_entropy
            tokens += losses.tokens
            checksum += batch.checksum
        return entropy, tokens, checksum

    def _update(self, agreed: Tensor, samples: int) -> Tensor:
        """Judge the gradients and apply them."""
        t = self.job.training
        entropy, tokens, square, checksum, stops = agreed.unbind()
        # where labels are masked, the mean is over those that are left
        share = tokens.clamp(min=1) / (samples * self.job.model.seq_length)
        loss, norm, scale = entropy / tokens.clamp(min=1), square.sqrt() / share, self.scale.scale
        verdict = self.guard.judge(loss, norm, ~self.scale.at_minimum)
        rate = self.rates.take(self.optimizer.steps)  # skipped steps leave the rate where it is
        self.optimizer.step(rate, divisor(norm, t.clip_grad, scale) * share, verdict.skip)
        self.optimizer.zero_grad()
        values = [loss, norm / scale, rate, scale, checksum, stops, *verdict[1:], self.guard.skipped_in_a_row]
        values = [value.double() for value in values]  # copies: what follows changes some in place
        self.scale.update(verdict.overflow | verdict.nan)  # at the lowest scale this only begins the count of good steps anew
        return torch.stack(values)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name; reading into them is loading."""
        weights = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_tensors().items()}

    def state(self) -> dict[str, int | float]:
        """What else the next step depends on; waits for the device."""
        return {"optimizer_steps": self.optimizer.applied_steps(), **self.scale.state(), **self.guard.state()}

    def load_state(self, state: dict[str, int | float | bool]) -> None:
        """Go on from `state()`."""
        self.optimizer.set_steps(int(state["optimizer_steps"]))
        self.scale.load({key: state[key] for key in SCALE_STATE if key in state})
        self.guard.load(state)
