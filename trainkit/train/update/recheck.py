"""Where a step that is not finite went wrong: the step is computed once more, with a look at
everything on the way.

A healthy step pays nothing for it: the hooks are there for the second computation alone. All
ranks do it together, for forward and backward talk to each other; all report the first finding
of any of them.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.base.errors import TrainkitError
from trainkit.train.model.batch import Batch
from trainkit.train.parallel.data_parallel import World
from trainkit.train.torch_compat import local_part
from trainkit.train.update.step import Step

WEIGHTS, ALONE, SUMMED = range(3)  # in which order causes come
FORWARD, BACKWARD = range(2)
MANY = 4  # samples that are named


@dataclass(frozen=True, order=True)
class NonFinite:
    """Something that is not finite. What sorts first is nearer to the cause.

    Args:
        stage: WEIGHTS before the step; ALONE in one micro-batch; SUMMED: only the sum over
            micro-batches and ranks is not finite.
        micro_batch: which one of the rank's, from 0.
        pass_: FORWARD or BACKWARD.
        depth: place of the chunk of the model, in the order of the pass.
        number: how many looks at this chunk, micro-batch and pass came before.
        rank: whose finding.
        what: in words.
        samples: positions of the micro-batch's samples in the order of samples, or of those among
            them that are concerned.
    """

    stage: int
    micro_batch: int
    pass_: int
    depth: int
    number: int
    rank: int
    what: str
    samples: tuple[int, ...] = ()


def _wrong(x: Tensor) -> int:
    """How many values are not finite."""
    return x.numel() - int(torch.isfinite(x).sum())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


class NonFiniteDetector:
    """Looks at what every module of a rank makes, at the gradients of that, and at the gradients
    of weights. Keeps the first finding.

    Args:
        modules: the model, or this rank's chunks of it.
        rank: this rank.
    """

    def __init__(self, modules: Iterable[nn.Module], rank: int) -> None:
        self.modules = list(modules)
        self.rank = rank
        self.first: NonFinite | None = None
        self.batches: list[Batch] = []
        self._looks: dict[tuple[int, int, int], int] = {}
        # chunks whose forward runs; outside of it a block is computed again for its backward
        self._running: set[int] = set()
        self._behind: dict[int, int] = {}  # by chunk: the micro-batch whose backward runs
        self._hooked: set[int] = set()

    def reads(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, taken note of."""
        for batch in batches:
            self.batches.append(batch)
            yield batch

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at all that is computed meanwhile."""
        with ExitStack() as handles:

            def keep(handle: Any) -> None:
                handles.callback(handle.remove)

            for chunk, root in enumerate(self.modules):
                for name, module in root.named_modules():
                    keep(module.register_forward_pre_hook(partial(self._enters, chunk, name, keep)))
                    keep(module.register_forward_hook(partial(self._leaves, chunk, name)))
            yield

    def look(self, stage: int, tensors: Iterable[tuple[str, Tensor]], kind: str) -> None:
        """Look at tensors that belong to no micro-batch."""
        for number, (name, tensor) in enumerate(tensors):
            if count := _wrong(tensor):
                self._keep(
                    NonFinite(
                        stage,
                        0,
                        FORWARD,
                        0,
                        number,
                        self.rank,
                        f"{kind} of {name}, {count} of {tensor.numel()} values of this rank's part",
                    )
                )
                return

    def _keep(self, finding: NonFinite) -> None:
        if self.first is None:
            self.first = finding
        else:
            self.first = min(self.first, finding)

    def _micro_batch(self, chunk: int) -> int:
        """Of the forward that runs: a pipeline sets it, else they are read one by one."""
        return int(getattr(self.modules[chunk], "micro_batch", len(self.batches) - 1))

    def _enters(
        self, chunk: int, name: str, keep: Callable[[Any], None], module: nn.Module, _: Any
    ) -> None:
        if not name:
            self._running.add(chunk)
        for own, parameter in module.named_parameters(prefix=name):
            # fully_shard has gathered it
            whole = not isinstance(parameter, DTensor) and parameter.requires_grad
            if whole and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                keep(parameter.register_hook(partial(self._weight_gradient, chunk, own)))  # type: ignore[no-untyped-call]

    def _leaves(self, chunk: int, name: str, module: nn.Module, _: Any, made: Any) -> None:
        if chunk not in self._running:
            return
        micro_batch = self._micro_batch(chunk)
        if name:
            words = f"the output of {name}"
        elif not isinstance(made, Tensor) or made.dim() < 2:
            words = "the loss"
        else:
            words = "the output of the last block"
        for tensor in _tensors(made):
            self._see(chunk, micro_batch, FORWARD, words, tensor)
            if tensor.requires_grad:
                look = partial(
                    self._activation_gradient, chunk, micro_batch, f"the gradient of {words}"
                )
                tensor.register_hook(look)  # type: ignore[no-untyped-call]
        if not name:
            self._running.discard(chunk)

    def _activation_gradient(
        self, chunk: int, micro_batch: int, words: str, gradient: Tensor
    ) -> None:
        self._behind[chunk] = micro_batch
        self._see(chunk, micro_batch, BACKWARD, words, gradient)

    def _weight_gradient(self, chunk: int, name: str, gradient: Tensor) -> None:
        self._see(
            chunk,
            self._behind.get(chunk, self._micro_batch(chunk)),
            BACKWARD,
            f"the gradient of {name}",
            gradient,
        )

    def _see(self, chunk: int, micro_batch: int, pass_: int, words: str, tensor: Tensor) -> None:
        place = (chunk, micro_batch, pass_)
        number = self._looks[place] = self._looks.get(place, 0) + 1
        tensor = tensor.detach()
        count = _wrong(tensor)
        if not count:
            return
        batch = self.batches[micro_batch]
        size = batch.tokens_BS.shape[0]
        rows = [*range(size)]
        if tensor.dim() == 3 and tensor.shape[0] == size:
            rows = (~torch.isfinite(tensor).flatten(1).all(1)).nonzero().flatten().tolist()
        depth = getattr(self.modules[chunk], "number", 0)
        what = f"{words}, {count} of {tensor.numel()} values"
        samples = tuple(batch.position + row for row in rows)
        self._keep(
            NonFinite(
                ALONE,
                micro_batch,
                pass_,
                depth if pass_ == FORWARD else -depth,
                number,
                self.rank,
                what,
                samples,
            )
        )


@dataclass(frozen=True)
class RecheckResult:
    """What a second computation shows: the first finding, None where all is finite now, and how
    many ranks found any before gradients were summed."""

    first: NonFinite | None
    ranks: int


@dataclass(frozen=True)
class RecheckedStep:
    """A step that is computed once more.

    Args:
        step: whose weights it is computed with.
        batches: this rank's micro-batches of that step.
        samples: of its global batch.
        scale: the loss scale it was taken with.
    """

    step: Step
    batches: Iterable[Batch]
    samples: int
    scale: float


def find_cause(again: RecheckedStep, world: World, where: Callable[[int], str]) -> str:
    """What is not finite first when a step is computed once more, in words for its error; all
    ranks ask together. `where` names the dataset and the number of the sample at a position."""
    try:
        again.step.model_parts.train()
        found = recompute_step(again, world.rank)
    except (RuntimeError, TrainkitError) as error:
        # the step's own error must be reported whatever happens here
        return f"where it begins is not known, for it could not be computed again: {error}"
    return explain(found, world.size, where)


def recompute_step(again: RecheckedStep, rank: int) -> RecheckResult:
    """Forward and backward of a step once more, on all ranks together, of which this is `rank`;
    gradients and counts are dropped afterwards."""
    step = again.step
    watch = NonFiniteDetector(step.model_parts.modules, rank)
    parameters = step.model_parts.parameters
    watch.look(
        WEIGHTS, ((name, local_part(h.parameter)) for name, h in parameters.items()), "the weights"
    )
    before = step.scale.scale
    step.scale.scale = torch.full_like(step.scale.scale, again.scale)
    step.optimizer.zero_grad()
    try:
        # compiled code would be compiled again with the hooks in it
        with torch.compiler.set_stance("force_eager"), watch.hooks():
            step.backward(watch.reads(again.batches), again.samples)
        gradients = (
            (name, local_part(h.parameter.grad))
            for name, h in parameters.items()
            if h.parameter.grad is not None
        )
        watch.look(SUMMED, gradients, "the sum over micro-batches and ranks of the gradient")
    finally:
        step.scale.scale = before
        step.optimizer.zero_grad()
        step.take_counts()
    everyone: list[NonFinite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, watch.first)
    found = [finding for finding in everyone if finding is not None]
    return RecheckResult(
        min(found, default=None), sum(finding.stage != SUMMED for finding in found)
    )


def explain(found: RecheckResult, world: int, where: Callable[[int], str]) -> str:
    """A sentence for the error. `where` names the dataset and the number of the sample at a
    position."""
    first = found.first
    if first is None:
        flaw = (
            "the weights have changed since, or a device or its memory is at fault (run `doctor`,"
            " look for ECC errors)"
        )
        return f"computed again, everything is finite: {flaw}"
    if first.stage != ALONE:
        return f"computed again, the first that is not finite: {first.what}, rank {first.rank}"
    on = f"; {found.ranks} of {world} ranks find something by themselves"
    names = [f"{position} ({where(position)})" for position in first.samples[:MANY]] + ["..."] * (
        len(first.samples) > MANY
    )
    return (
        f"computed again, the first that is not finite: {first.what}, rank {first.rank},"
        f" micro-batch {first.micro_batch}, sample {', '.join(names)}{on}"
    )
