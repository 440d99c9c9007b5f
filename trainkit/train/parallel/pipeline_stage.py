"""torch.distributed.pipelining's stages and schedules as the trainer needs them: the one file
that knows of their private parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from trainkit.jobs.schema import Parallelism
from trainkit.train.metrics.timers import Phase, Timers
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.torch_compat import forget_forward, widen_gradients


class LeanStage(PipelineStage):
    """A pipeline stage that has memory for activations in flight only: torch's own allocates a
    buffer for each micro-batch of a step, there and back, and keeps them for good. Runs forward
    alone, too, under the schedules where torch's cannot (ZBV).

    Args:
        module: the stage's.
        number: which stage, of `count`.
        shape, dtype: of what goes from one stage to the next. Given these, torch does not try a
            micro-batch to find them out.
        group: the stages.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        count: int,
        device: torch.device,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        # without requires_grad no gradient would be sent back
        between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        given = torch.empty((1,), dtype=torch.int64, device="meta") if number == 0 else between
        wide = torch.promote_types(dtype, torch.float32)
        if number == count - 1:
            made = torch.empty((1,), dtype=wide, device="meta", requires_grad=True)
        else:
            made = between
        self._arriving = (shape, dtype)
        super().__init__(
            module, number, count, device, input_args=given, output_args=made, group=group
        )

    def _without_memory(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        real = self.device
        self.device = torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = real

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = self._without_memory(super()._prepare_forward_infra, *args, **kwargs)
        self._drop(*self.args_recv_info.values())
        return found

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = self._without_memory(super()._prepare_backward_infra, *args, **kwargs)
        self._drop(*self.grad_recv_info.values())
        return found

    def _room(self, infos: Any, *, learning: bool) -> None:
        for info in infos:
            if getattr(info, "buffer", None) is not None and info.buffer.is_meta:
                info.buffer = torch.empty(
                    self._arriving[0],
                    dtype=self._arriving[1],
                    device=self.device,
                    requires_grad=learning,
                )

    def _drop(self, *of_micro_batches: Any) -> None:
        for info in (info for infos in of_micro_batches for info in infos):
            if getattr(info, "buffer", None) is not None:
                # some versions of torch look at its gradient
                info.buffer = torch.empty(0, device="meta")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._room(self.args_recv_info[fwd_chunk_id], learning=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._room(self.grad_recv_info[bwd_chunk_id], learning=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop(self.args_recv_info[fwd_chunk_id])  # what backward needs of it, it holds itself
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            forget_forward(self, bwd_chunk_id)
            return
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            widen_gradients(self.submod)  # else weight halves in a row would add up in 16 bits

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class TimedStage(LeanStage):
    """torch's stage of one chunk, which is timed; what goes on in between
    counts as `pipeline`."""

    def __init__(
        self,
        chunk: Any,
        count: int,
        mesh: Mesh,
        timers: Timers,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.timers = timers
        super().__init__(chunk, chunk.number, count, mesh.device, shape, dtype, mesh.pipeline_group)

    def _timed(self, phase: Phase, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:  # an evaluation is a phase of its own
            return call(*args, **kwargs)
        self.timers.end()
        try:
            with self.timers(phase):
                return call(*args, **kwargs)
        finally:
            self.timers.begin("pipeline")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id  # type: ignore[assignment]  # a Chunk
        return self._timed("forward", super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._timed("backward", super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._timed("backward", super().backward_weight_one_chunk, bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._timed("communication", super().perform_reduce_grad, grad_scale_factor)


def make_schedule(
    parallelism: Parallelism,
    mesh: Mesh,
    chunks: Sequence[Any],
    micro_batches: int,
    timers: Timers,
    activations: tuple[tuple[int, ...], torch.dtype],
    *,
    learning: bool,
) -> Any:
    """The job's schedule over new stages of this rank's chunks.

    Args:
        activations: shape and dtype of what goes from chunk to chunk.
        learning: forward and backward, of what the last chunk returns; else forward alone.
    """
    count = parallelism.pipeline_model_parallel_size * len(chunks)
    stages: list[Any] = [TimedStage(chunk, count, mesh, timers, *activations) for chunk in chunks]
    # scale_grads would divide after adding up, too late for fp16; the objective is divided already
    loss = _summed if learning else None
    if parallelism.pipeline_schedule == "zbv":
        return ScheduleZBVZeroBubble(stages, micro_batches, loss_fn=loss, scale_grads=False)
    if parallelism.pipeline_schedule != "1f1b":
        assert_never(parallelism.pipeline_schedule)
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, scale_grads=False)
    if micro_batches >= count:
        return Schedule1F1B(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    # With fewer micro-batches than stages all forwards of 1F1B are its warm-up: GPipe's order,
    # which torch's 1F1B leaves to it.
    return ScheduleGPipe(stages[0], micro_batches, loss_fn=loss, scale_grads=False)


def _summed(objective: Any, _: Any) -> Any:
    return objective.sum()
