"""Every family in every precision: loss and gradients of the trainer's own step beside the same
model in fp64 on the CPU, from the same weights and tokens.

The distance of gradients is |g - g64| / |g64| over all parameters as one vector. Bounds are those
of the formats: fp32 sums of a few thousand terms, 8 bits of mantissa in bf16 and 11 in fp16 through
a few layers. A wrong formula is off by tenths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged
from benchmarks.gpu.sessions import FAMILIES, DeviceType, Size, make_job, small_model, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trainkit.jobs.schema import Job
    from trainkit.train.model.batch import Batch

# (relative difference of the loss, distance of the gradients)
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 5e-2), "fp16": (1e-3, 1e-2)}

COMPILED = ("gpt", "llama", "gemma3")  # the others differ in what is compiled alike

SCALE = 2.0**12  # of fp16: the default begins where the first steps overflow, and halves


@dataclass(frozen=True)
class Computed:
    """Loss (nats a token) and gradients by name, in fp64 on the CPU."""

    loss: float
    gradients: dict[str, Tensor]

    def distance(self, other: Computed) -> float:
        """Of the gradients, in parts of `other`'s."""
        import torch

        difference = [self.gradients[name] - g for name, g in other.gradients.items()]
        whole = torch.stack([g.square().sum() for g in other.gradients.values()]).sum().sqrt()
        return float(torch.stack([d.square().sum() for d in difference]).sum().sqrt() / whole)


def by_trainer(job: Job) -> tuple[Computed, list[Batch]]:
    """What one global batch gives in the trainer, and the micro-batches it read."""
    with trainer(job) as made:
        samples = job.global_batch_size
        batches = list(made.train_feed.read(0, samples))
        runner = made.step_runner
        entropy, tokens, _ = runner.backward(batches, samples)
        scale = float(runner.scale.scale)
        gradients = {
            name: _whole(shards).cpu().double() / scale
            for name, shards in runner.gradients().items()
        }
        found = Computed(float(entropy / tokens), gradients)
        on_host = [
            replace(batch, tokens_BS=batch.tokens_BS.cpu(), labels_BS=batch.labels_BS.cpu())
            for batch in batches
        ]
        return found, on_host


def _whole(shards: Any) -> Tensor:
    """One rank holds all of a tensor, in one piece."""
    (part,) = shards.parts.values()
    whole: Tensor = part
    return whole


def by_reference(job: Job, batches: list[Batch]) -> Computed:
    """The same in fp64, without any parallelism, mixed precision or compiler."""
    from trainkit.train.batches import vocab_size
    from trainkit.train.model.head_loss import Labels, Losses
    from trainkit.train.model.transformer import Transformer
    from trainkit.train.parallel.initialize import initialize

    model = Transformer(job.model, vocab_size(job)).double()
    initialize(model, job.model, job.training.seed)
    entropy = 0.0
    factor = 1.0 / (job.global_batch_size * job.model.seq_length)
    for batch in batches:
        losses = model(batch.tokens_BS, Labels(batch.labels_BS, scale=factor))
        assert isinstance(losses, Losses)
        losses.objective.backward()  # type: ignore[no-untyped-call]
        entropy += float(losses.cross_entropy)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Computed(entropy * factor, gradients)


def compared(name: str, precision: str, found: Computed, reference: Computed) -> Finding:
    """One row: how far loss and gradients are from the reference."""
    loss_bound, gradient_bound = BOUNDS[precision]
    off = abs(found.loss - reference.loss) / reference.loss
    distance = found.distance(reference)
    return judged(
        name,
        off <= loss_bound and distance <= gradient_bound,
        f"loss {off:.1e}, gradients {distance:.1e}",
        goal=f"{loss_bound:.0e}, {gradient_bound:.0e}",
    )


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Families x precisions, and each family compiled in bf16 where there is time for it."""
    for family in FAMILIES:
        cases = [(precision, False) for precision in BOUNDS]
        if size == "full" and family in COMPILED:
            cases.append(("bf16", True))
        model = small_model(family, size)
        reference: Computed | None = None
        for precision, compiled in cases:
            job = make_job(
                "numerics",
                model,
                device,
                folder,
                precision=precision,
                compile=compiled,
                initial_loss_scale=SCALE,
            )
            found, batches = by_trainer(job)
            reference = reference or by_reference(job, batches)
            words = f"{family} {precision}" + (" compiled" if compiled else "")
            yield compared(words, precision, found, reference)
