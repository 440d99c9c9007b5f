"""What an engine demands of a layout and what it holds in memory and on disk, as data. The
engines' own values come from `trainkit.engines.rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.devices import Precision
from trainkit.jobs.job_tables import Parallelism
from trainkit.jobs.schema import Job
from trainkit.plan.objection import Objection

ALL_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter of one precision: weights as they compute, gradients, and what the
    optimizer holds besides its moments and of each moment."""

    weights: int
    gradients: int
    master: int
    moment: int


@dataclass(frozen=True)
class Rules:
    """One engine. Without further words, trainkit's own.

    Args:
        engine: its name in jobs.toml.
        families: of models that it has; None: all.
        counts_ends: embedding and loss may count as layers of the first and the last stage.
        uneven_stages: pipeline stages may hold different numbers of layers.
        virtual_stages: it has an interleaved schedule.
        whole_rounds: under that schedule the micro-batches of a step must be a multiple of the
            stages; False: torch.distributed.pipelining's own demand, a multiple of the rounds that
            the stages make.
        zero_bubble: it has ZB-V, `zero_in_bubble` with these values of zero_stage: where parameters
            are resharded, backward would gather them twice.
        uneven_shares: the MLP's width need not divide by tensor-parallel size.
        repeats_groups: heads of keys and values may be fewer than tensor-parallel ranks, which then
            hold the same ones.
        replicates: it has HSDP.
        zero_stages: values of zero_stage it has; `zero_in_pipeline`: with more than one stage.
        pads_weights: embedding and head have the padded vocabulary in memory and in checkpoints
            too.
        states: bytes a parameter by precision; None: the native trainer's, fp32 masters and
            gathered copies.
        saves_scores: attention scores are kept for backward unless they are recomputed; False:
            attention is fused.
        logit_bytes: a logit of the last stage, all copies and gradients of it; 0: the native
            trainer's chunks.
        bucket_elements: elements of the buffer that gradients are reduced through.
        checkpoint_weights: bytes a parameter of a checkpoint without moments, by precision.
        deletes_old: it keeps only the newest checkpoints.
        saves_key: the key of engine_args that is false where nothing is saved; "": none.
        save_seconds: between checkpoints where the job says no save_interval; 0: it says steps.
        uncounted: options of engine_args, with "_" for "-", that give the model or its layout
            another size than the job's tables say, unless they are 0 or 1.
        objections: what else of a job's layout the engine cannot do, where that hangs on more of
            the job than these values.
        memory_band: what published runs took over what this plan says of them: a tenth of them less
            than the first, a tenth more than the second. None: nothing was published, or measured.
    """

    engine: str = "native"
    families: tuple[str, ...] | None = None
    counts_ends: bool = False
    uneven_stages: bool = True
    virtual_stages: bool = True
    whole_rounds: bool = False
    zero_bubble: bool = True
    zero_in_bubble: tuple[int, ...] = (0, 1)
    uneven_shares: bool = True
    repeats_groups: bool = True
    replicates: bool = True
    zero_stages: tuple[int, ...] = ALL_STAGES
    zero_in_pipeline: tuple[int, ...] = (0, 1, 3)
    pads_weights: bool = False
    states: Mapping[Precision, StateBytes] | None = None
    saves_scores: bool = False
    logit_bytes: int = 0
    bucket_elements: int = 0
    checkpoint_weights: Mapping[Precision, int] = field(
        default_factory=lambda: {"fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4}
    )
    deletes_old: bool = True
    saves_key: str = ""
    save_seconds: int = 0
    uncounted: tuple[str, ...] = ()
    objections: Callable[[Job], Iterator[Objection]] = lambda job: iter(())
    memory_band: tuple[float, float] | None = None

    def vocab_rows(self, vocab_size: int, padded: int) -> int:
        """Rows of embedding and head as the engine keeps them."""
        return padded if self.pads_weights else vocab_size


# of trainkit's own trainer
NATIVE = Rules()


def zero_bubble_problem(parallelism: Parallelism, torch: str) -> str:
    """Why the native trainer refuses ZB-V with a version of torch; "" where it takes it, or does
    not know the version. torch 2.11 takes the first result of an operation alone where a backward
    is made in two halves, and finds no graph where the operation is Python's."""
    if parallelism.pipeline_schedule != "zbv" or _not_before_2_13(torch):
        return ""
    return (
        "pipeline_schedule = 'zbv' needs torch 2.13 or newer for its backward in two halves; this"
        f" is {torch}"
    )


def experts_apart_problem(parallelism: Parallelism, torch: str) -> str:
    """Why the native trainer refuses a model with experts in a layout with a version of torch; ""
    where it takes it, or does not know the version. Under any of the three sizes experts are
    sharded over other ranks than the rest of a block; torch 2.11's fully_shard knows one mesh."""
    keys = ("tensor_model", "expert_model", "expert_tensor")
    values = {f"{key}_parallel_size": getattr(parallelism, f"{key}_parallel_size") for key in keys}
    above_1 = [f"{key} {value}" for key, value in values.items() if (value or 1) > 1]
    if not above_1 or _not_before_2_13(torch):
        return ""
    return (
        f"{above_1[0]} for a model with experts needs torch 2.13 or newer, which shards experts"
        f" over ranks of their own; this is {torch}"
    )


def float8_problem(precision: Precision, capability: tuple[int, int]) -> str:
    """Why the native trainer refuses a precision on a GPU of a compute capability; "": it does
    not."""
    if precision != "fp8" or capability >= (8, 9):
        return ""
    return (
        "training.precision = 'fp8' needs a GPU of compute capability 8.9 or higher (L40S, H100,"
        f" B200); this one has {'.'.join(map(str, capability))}"
    )


def _not_before_2_13(torch: str) -> bool:
    """Whether a version of torch is that new, or not known."""
    return not torch or tuple(map(int, torch.split(".")[:2])) >= (2, 13)
