"""How a job's ranks share its model: degrees, stages, micro-batches in flight, the padded vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from trainkit.jobs.schema import Job


def split_layers(layers: int, parts: int) -> list[int]:
    """Layers of each part in order, as equal as can be, the larger ones first: 44 over 6 are 8 8 7 7 7 7, as DeepSpeed's `type:transformer|mlp`."""
    each, more = divmod(layers, parts)
    return [each + (part < more) for part in range(parts)]


def padded_vocab_size(vocab_size: int, divisor: int, tensor: int) -> int:
    """V rounded up to a multiple of make_vocab_size_divisible_by x tensor-parallel size (Megatron-LM, tokenizer `_vocab_size_with_padding`)."""
    return vocab_size + -vocab_size % (divisor * tensor)


@dataclass(frozen=True)
class Layout:
    """Degrees and stages of a job. Where the degrees do not divide the world, as if by one data-parallel rank or more; the plan objects then.

    Args:
        tensor, pipeline, virtual, data: degrees; virtual: chunks of the model on each stage.
        chunks: layers of each chunk in the model's order; chunk i is on stage i % pipeline.
        sequence: activations between blocks are split over tensor-parallel ranks (off where there is one, as Megatron-LM has it).
        micro_batches: of one step, on one rank.
    """

    world: int
    ranks_per_node: int
    tensor: int
    pipeline: int
    virtual: int
    data: int
    chunks: tuple[int, ...]
    sequence: bool
    micro_batches: int

    def stage_layers(self, stage: int) -> list[int]:
        """Numbers of the layers on a stage."""
        bounds = [0, *accumulate(self.chunks)]
        return [layer for i in range(stage, len(self.chunks), self.pipeline) for layer in range(bounds[i], bounds[i + 1])]

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(sum(self.chunks[stage :: self.pipeline]) for stage in range(self.pipeline))

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at once, for all of its layers.

        1F1B: min(p - stage, m) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1). Interleaved: 2 (p - stage - 1) + (v - 1) p + 1 chunks of 1 / v
        (Megatron-LM, core/pipeline_parallel/schedules.py); on the first stage 1 + (p - 1) / (p v) times L layers (Korthikanti et al. 2022, arXiv:2205.05198,
        section 4.2.3).
        """
        p, v, m = self.pipeline, self.virtual, self.micro_batches
        if v == 1:
            return min(p - stage, m)
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, m * v) / v

    @property
    def bubble_fraction(self) -> float:
        """Part of a step in which a stage waits: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2; there of the ideal time, (p - 1) / (v m))."""
        return (self.pipeline - 1) / (self.virtual * self.micro_batches + self.pipeline - 1)


def layout_of(job: Job) -> Layout:
    """The layout that a job asks for."""
    p = job.parallelism
    virtual = p.virtual_pipeline_model_parallel_size or 1
    return Layout(
        world=job.world_size,
        ranks_per_node=job.ranks_per_node,
        tensor=p.tensor_model_parallel_size,
        pipeline=p.pipeline_model_parallel_size,
        virtual=virtual,
        data=job.data_parallel_size,
        chunks=tuple(split_layers(job.model.num_layers, p.pipeline_model_parallel_size * virtual)),
        sequence=p.sequence_parallel and p.tensor_model_parallel_size > 1,
        micro_batches=job.gradient_accumulation_steps,
    )


def nearest(wanted: int, fits: Callable[[int], bool], *, most: int | None = None) -> list[int]:
    """The nearest number below and the nearest above `wanted` that fit, from 1 to `most` (4 x wanted without one)."""
    highest = 4 * wanted if most is None else most
    below = next((n for n in range(min(wanted - 1, highest), 0, -1) if fits(n)), None)
    above = next((n for n in range(wanted + 1, highest + 1) if fits(n)), None)
    return [n for n in (below, above) if n is not None]
