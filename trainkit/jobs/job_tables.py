"""Tables inside a job: its parallelism, checkpoints, sample, profile, W&B and retries; and where an
engine comes from."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainkit.jobs.table import NAME, Strings, Table, wrong

# engines whose checkpoints `convert` reads
CONVERTED = ("gpt-neox", "megatron-bridge", "megatron-lm", "torchtitan")


class Parallelism(Table):
    """How the ranks share the work. Data-parallel size is what remains of the world."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="tensor-parallel size")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=2, description="model chunks of each stage under an interleaved schedule"
    )
    pipeline_schedule: Literal["1f1b", "zbv"] = Field(
        "1f1b",
        description=(
            "1f1b: one forward, one backward, interleaved where"
            " virtual_pipeline_model_parallel_size is given; zbv: zero bubble, without compile"
        ),
    )
    sequence_parallel: bool = Field(
        False, description="activations between blocks split over the tensor-parallel ranks"
    )
    context_parallel_size: int = Field(
        1, ge=1, description="context-parallel size: ranks that the tokens of a sample are dealt to"
    )
    cp_comm_type: Literal["p2p", "a2a"] = Field(
        "p2p",
        description=(
            "how attention sees all tokens: p2p, keys and values go round the context-parallel"
            " ranks; a2a, each has all tokens of some heads"
        ),
    )
    expert_model_parallel_size: int = Field(
        1, ge=1, description="ranks that the experts of a layer lie on"
    )
    expert_tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        description="ranks that one expert is split over; by default tensor_model_parallel_size",
    )
    zero_stage: int = Field(
        1,
        ge=0,
        le=3,
        description=(
            "0: replicated; 1: optimizer state sharded; 2: gradients too; 3: parameters too"
        ),
    )
    data_parallel_replicate_size: int = Field(
        1,
        ge=1,
        description=(
            "HSDP: whole copies of the model; each is sharded over data-parallel size / this many"
            " ranks, and gradients are summed over copies"
        ),
    )

    @property
    def ranks_of_a_sample(self) -> int:
        """Ranks that compute each sample together."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )

    @model_validator(mode="after")
    def _fits(self) -> Parallelism:
        if self.data_parallel_replicate_size > 1 and self.zero_stage == 0:
            raise wrong(
                "data_parallel_replicate_size",
                "data_parallel_replicate_size is for zero_stage 1 to 3: with 0 every rank holds a"
                " whole copy",
            )
        if self.pipeline_schedule == "zbv" and (
            self.pipeline_model_parallel_size == 1 or self.virtual_pipeline_model_parallel_size
        ):
            needs_what = (
                "pipeline_model_parallel_size above 1 and no virtual_pipeline_model_parallel_size:"
                " it has two chunks on each stage by itself"
            )
            raise wrong("pipeline_schedule", f"pipeline_schedule = 'zbv' needs {needs_what}")
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise wrong(
                "virtual_pipeline_model_parallel_size",
                "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1",
            )
        return self


class EngineSource(Table):
    """Where an engine that is not trainkit's own comes from, and what runs it."""

    NAMES: ClassVar[tuple[str, ...]] = (
        "gpt-neox",
        "megatron-bridge",
        "megatron-lm",
        "nemo",
        "neuronx-nemo",
        "torchtitan",
    )

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    engine: (
        Literal["gpt-neox", "megatron-bridge", "megatron-lm", "nemo", "neuronx-nemo", "torchtitan"]
        | None
    ) = Field(None, description="which engine it is; by default the one the table is named after")
    source: str = Field(min_length=1, description="a git URL, or a folder")
    revision: str | None = Field(
        None, min_length=1, description="commit, tag or branch of the git URL"
    )
    version: str | None = Field(
        None,
        min_length=1,
        description="whose options it has, such as core-0.12.0; by default what its tree says",
    )
    options: Literal["table", "from-source"] = Field(
        "table",
        description=(
            "what engine_args are checked against: trainkit's table of the version, or"
            " (megatron-lm, megatron-bridge) what the tree itself says, which the stage"
            " engine-prebuild asks"
        ),
    )
    python: str | None = Field(
        None,
        min_length=1,
        description=(
            "the interpreter on the nodes that has what the engine needs; by default that of venv,"
            " of the container or of the cluster"
        ),
    )
    venv: str | None = Field(
        None,
        min_length=1,
        description=(
            "a folder for an environment of its own, which the stage engine-install makes and all"
            " nodes see"
        ),
    )
    requirements: Strings = Field(
        (), description="lines for pip in that environment, over those known for the engine"
    )
    launch: Literal["ranks", "deepspeed", "srun"] = Field(
        "ranks",
        description=(
            "ranks: trainkit's agents start every rank; deepspeed (gpt-neox): deepy.py starts them"
            " over its own hostfile; srun (nemo): one srun starts them, as in the launcher's script"
        ),
    )
    container: str | None = Field(None, description="the [containers.X] table it runs in")

    @model_validator(mode="after")
    def _is_an_engine(self) -> EngineSource:
        if self.name and self.engine is None and self.name not in self.NAMES:
            raise wrong(
                "name",
                f"there is no engine {self.name!r}; engines: {', '.join(self.NAMES)}. A table of"
                " another name says which one by its key engine",
            )
        if self.venv and self.python:
            raise wrong("python", "python and venv exclude each other: venv has its own python")
        if self.requirements and not self.venv:
            raise wrong("requirements", "requirements are installed into venv, which is not given")
        if self.launch == "deepspeed" and self.kind not in ("gpt-neox", ""):
            raise wrong("launch", f"launch = 'deepspeed' is gpt-neox's; {self.kind} has none")
        if self.options == "from-source" and self.kind not in (
            "megatron-lm",
            "megatron-bridge",
            "",
        ):
            raise wrong("options", f"options = 'from-source' is Megatron's; {self.kind} has none")
        if self.launch == "srun" and self.kind not in ("nemo", ""):
            raise wrong("launch", f"launch = 'srun' is nemo's; {self.kind} has none")
        return self

    @property
    def kind(self) -> str:
        """Which engine it is."""
        return self.engine or self.name


class CheckpointSettings(Table):
    """What is kept on disk."""

    keep_last: int = Field(
        2,
        ge=1,
        description=(
            "newest checkpoints kept; older ones are deleted after a save and after the last"
            " evaluation, but for those that the next two keys keep"
        ),
    )
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints of steps that are a multiple of this are always kept"
    )
    keep_best: int = Field(
        0,
        ge=0,
        description=(
            "so many with the lowest validation loss are kept; only those of steps with an"
            " evaluation have one"
        ),
    )
    verify: Literal["size", "sample", "full"] = Field(
        "full",
        description=(
            "what is looked at before one is read: sizes always; sample: the hash of one file in 8;"
            " full: of every file, each by one rank"
        ),
    )
    save_async: bool = Field(
        False,
        description=(
            "write while training goes on, from a copy in host memory: 12 bytes for every parameter"
            " that a rank holds"
        ),
    )
    save_first: bool = Field(
        False,
        description=(
            "write one of step 0 before a new run's first step: a disk that does not take it ends"
            " the run then (exit 10)"
        ),
    )
    memory_interval: int | str | None = Field(
        None,
        description=(
            'every so many steps (10), or seconds ("30s"), copy the state into the memory of the'
            " hosts, where it outlives the ranks: twice 12 bytes for every parameter that a rank"
            " holds; where there are several nodes as much again, of a rank of another node"
        ),
    )
    filesystem: str | None = Field(
        None, description="which of the cluster's filesystems they go to; by default its only one"
    )

    @model_validator(mode="after")
    def _is_an_interval(self) -> CheckpointSettings:
        if self.memory_interval is not None and not (self.memory_steps or self.memory_seconds):
            raise wrong(
                "memory_interval",
                f"memory_interval = {self.memory_interval!r} is neither a number of steps (10) nor"
                ' of seconds ("30s")',
            )
        return self

    @property
    def memory_steps(self) -> int:
        """Steps between two copies in memory; 0: none, or by time."""
        return max(0, self.memory_interval) if isinstance(self.memory_interval, int) else 0

    @property
    def memory_seconds(self) -> float:
        """Seconds between two copies in memory; 0: none, or by steps."""
        found = re.fullmatch(r"(\d{1,9}(\.\d{1,3})?)s", str(self.memory_interval))
        return float(found[1]) if found else 0.0


class GenerateSettings(Table):
    """The sample printed when training ends."""

    prompt: str = Field(
        "", description="text the sample goes on from; empty: from the end-of-document token"
    )
    max_new_tokens: int = Field(64, ge=1, description="tokens of the sample")
    prompts: Strings = Field(
        (),
        description=(
            "texts that `report --samples` has each checkpoint go on from; by default prompt"
        ),
    )
    while_training: bool = Field(
        False,
        description=(
            "whether a run goes on from these texts whenever it saves; not where ranks share the"
            " model (tensor and pipeline parallelism, ZeRO 3), nor with training.compile"
        ),
    )


class ProfileSettings(Table):
    """Which steps torch's profiler looks at; traces go to profile/ in the run folder."""

    start: int = Field(ge=1, description="first step that is profiled")
    stop: int = Field(ge=1, description="last step that is profiled")
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = Field(
        (0,), description="ranks that are profiled"
    )

    @model_validator(mode="after")
    def _ordered(self) -> ProfileSettings:
        if self.stop < self.start:
            raise wrong("stop", f"stop {self.stop} is before start {self.start}")
        return self


class WandbSettings(Table):
    """Metrics to Weights & Biases as well (needs the extra `wandb`); the run's id there is its
    id here, so a resumed run goes on."""

    project: str = Field(min_length=1, description="the W&B project")
    entity: str | None = Field(None, description="the W&B team or user; by default that of the key")
    group: str | None = Field(None, description="the W&B group")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: only files, for `wandb sync` later"
    )


class RetrySettings(Table):
    """How often a run goes on by itself after a failure, by the failure's class: one kind does
    not eat the budget of another."""

    infra: int = Field(3, ge=0, description="after a rank or host failed without fault of the job")
    hang: int = Field(2, ge=0, description="after a hang")
    user: int = Field(0, ge=0, description="after an error of the job's own code or data")
    preempted: int = Field(0, ge=0, description="after it was asked to save and stop")
    preemption: int = Field(
        100,
        ge=0,
        description=(
            "slurm: after Slurm took its nodes away: a job of higher priority, scontrol requeue"
        ),
    )
    time_limit: int = Field(1000, ge=0, description="slurm: after its time limit")
    same_step: int = Field(
        3,
        ge=1,
        description=(
            "identical failures at one step, with no progress between them, that end the run for"
            " good (exit 14)"
        ),
    )
    shrink: bool = Field(
        True, description="go on with fewer nodes where too few are left and the plan allows it"
    )
