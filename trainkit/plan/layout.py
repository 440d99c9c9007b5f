"""How a job's ranks share its model: degrees, stages, micro-batches in flight, the padded
vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.plan.split import split_layers, split_of

__all__ = ["Layout", "layout_of", "nearest", "padded_vocab_size", "split_layers"]


def padded_vocab_size(vocab_size: int, divisor: int, tensor: int) -> int:
    """V rounded up to a multiple of make_vocab_size_divisible_by x tensor-parallel size
    (Megatron-LM, tokenizer `_vocab_size_with_padding`)."""
    return vocab_size + -vocab_size % (divisor * tensor)


@dataclass(frozen=True)
class Layout:
    """Degrees and stages of a job. Where the degrees do not divide the world, as if by one
    data-parallel rank or more; the plan objects then.

    Args:
        tensor, pipeline, virtual, data: degrees.
        virtual: chunks of the model on each stage under an interleaved schedule.
        context: ranks that the tokens of a sample are dealt to.
        replicate: whole copies of the model among the data- and context-parallel ranks; each is
            sharded over data x context / replicate of them.
        v_shaped: the zero-bubble schedule ZB-V, which has two chunks on each stage, the first and
            the last of the model on the first stage.
        chunks: layers of each chunk in the model's order.
        sequence: activations between blocks are split over tensor-parallel ranks (off where there
            is one, as Megatron-LM has it).
        micro_batches: of one step, on one rank.
        expert, expert_tensor: ranks that the experts of a layer lie on, that one is split over.
        expert_shard: ranks that one copy of a stage's experts is sharded over.
        further: blocks of the last chunk besides, that predict one token more.
    """

    world: int
    ranks_per_node: int
    tensor: int
    pipeline: int
    virtual: int
    data: int
    context: int
    replicate: int
    v_shaped: bool
    chunks: tuple[int, ...]
    sequence: bool
    micro_batches: int
    expert: int
    expert_tensor: int
    expert_shard: int
    further: int = 0

    @property
    def data_context(self) -> int:
        """Ranks of a stage that hold the same weights together."""
        return self.data * self.context

    @property
    def shard(self) -> int:
        """Ranks that one copy of a stage is sharded over."""
        return max(1, self.data_context // self.replicate)

    @property
    def sequence_parts(self) -> int:
        """Ranks of a tensor-parallel group that share the tokens between its blocks."""
        return self.tensor if self.sequence else 1

    def stage_of(self, chunk: int) -> int:
        """Which stage a chunk is on: round and round, or down and up again."""
        if self.v_shaped and chunk >= self.pipeline:
            return 2 * self.pipeline - 1 - chunk
        return chunk % self.pipeline

    def chunks_of(self, stage: int) -> list[int]:
        """Numbers of the chunks on a stage."""
        return [chunk for chunk in range(len(self.chunks)) if self.stage_of(chunk) == stage]

    @property
    def last_stage(self) -> int:
        """The stage of the model's last chunk, where head and loss are."""
        return self.stage_of(len(self.chunks) - 1)

    def chunk_layers(self, chunk: int) -> range:
        """Numbers of the blocks of a chunk."""
        bounds = [0, *accumulate(self.chunks)]
        bounds[-1] += self.further
        return range(bounds[chunk], bounds[chunk + 1])

    def stage_layers(self, stage: int) -> list[int]:
        """Numbers of the layers on a stage."""
        return [layer for i in self.chunks_of(stage) for layer in self.chunk_layers(i)]

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """How many of the model's layers each stage has."""
        layers = [0] * self.pipeline
        for chunk, size in enumerate(self.chunks):
            layers[self.stage_of(chunk)] += size
        return tuple(layers)

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at once, for all of its layers.

        1F1B: min(p - stage, m) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
        Interleaved: 2 (p - stage - 1) + (v - 1) p + 1 chunks of 1 / v (Megatron-LM,
        core/pipeline_parallel/schedules.py); on the first stage 1 + (p - 1) / (p v) times L
        layers (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3). ZB-V: 2p chunks of
        half a stage, the 1F1B of the first stage on all of them (Qi et al. 2023,
        arXiv:2401.10241, section 6); m + 1 + stage where there are few micro-batches, as read
        off torch's schedule.
        """
        p = self.pipeline
        v = self.virtual
        m = self.micro_batches
        if self.v_shaped:
            return min(2 * p, 2 * m, m + 1 + stage) / 2
        if v == 1:
            return min(p - stage, m)
        together = m // max(1, m // p)  # micro-batches of a round: p, where p divides m
        return min(2 * (p - stage - 1) + (v - 1) * together + 1, m * v) / v

    def sent_in_flight(self, stage: int) -> float:
        """Results of chunks that a stage still has of micro-batches in flight, beside what its
        blocks keep: torch.distributed.pipelining keeps what it has sent, which is all but the
        model's last. Under ZB-V, at a stage's fullest moment: the first stage's is where its
        first micro-batch is at the model's end. On the last stage, where the V turns, a result
        is the next chunk's input too and is there once: so are those of p - 1 micro-batches
        after the first backward, and of all of them where none comes in after it. (As read off
        torch's stages and counted in its order of operations.)
        """
        if self.v_shaped:
            p = self.pipeline
            m = self.micro_batches
            # of the first stage's, one is the model's last
            there_once = {0: 1, p - 1: p - 1 if m > p else m}
            return 2 * self.in_flight(stage) - there_once.get(stage, 0)
        return self.in_flight(stage) * sum(i < len(self.chunks) - 1 for i in self.chunks_of(stage))

    @property
    def fills_world(self) -> bool:
        """Whether each rank has a place: only then has a step a time."""
        return self.tensor * self.pipeline * self.data_context == self.world

    @property
    def bubble_fraction(self) -> float:
        """Part of a step in which a stage waits: (p - 1) / (v m + p - 1) (Narayanan et al. 2021,
        section 2.2; there of the ideal time, (p - 1) / (v m)).

        ZB-V: (p - 1) / (6 m + p - 1): what is left of it is p - 1 forwards of half a stage,
        where forward, backward for the input and backward for the weights take equally long;
        from 2p micro-batches on, with fewer it is more (torch's order of operations, played
        through).
        """
        return (self.pipeline - 1) / (
            (6 if self.v_shaped else self.virtual) * self.micro_batches + self.pipeline - 1
        )


def layout_of(job: Job) -> Layout:
    """The layout that a job asks for."""
    p = job.parallelism
    virtual = p.virtual_pipeline_model_parallel_size or 1
    v_shaped = p.pipeline_schedule == "zbv"
    degrees = degrees_of(job)
    return Layout(
        world=job.world_size,
        ranks_per_node=job.ranks_per_node,
        tensor=p.tensor_model_parallel_size,
        pipeline=p.pipeline_model_parallel_size,
        virtual=virtual,
        data=job.data_parallel_size,
        context=p.context_parallel_size,
        replicate=degrees.replicate,
        v_shaped=v_shaped,
        chunks=split_of(job, p.pipeline_model_parallel_size, 2 if v_shaped else virtual).chunks,
        sequence=p.sequence_parallel and p.tensor_model_parallel_size > 1,
        micro_batches=job.gradient_accumulation_steps,
        expert=degrees.expert,
        expert_tensor=degrees.expert_tensor,
        expert_shard=degrees.expert_copies[1],
        further=job.model.blocks - job.model.num_layers,
    )


def nearest(wanted: int, fits: Callable[[int], bool], *, most: int | None = None) -> list[int]:
    """The nearest number below and the nearest above `wanted` that fit, from 1 to `most` (4 x
    wanted without one)."""
    highest = 4 * wanted if most is None else most
    below = next((n for n in range(min(wanted - 1, highest), 0, -1) if fits(n)), None)
    above = next((n for n in range(wanted + 1, highest + 1) if fits(n)), None)
    return [n for n in (below, above) if n is not None]
