"""What an experiment is: the tables of jobs.toml and the resolved Job, as frozen pydantic models.

Key names are Megatron's for models and training and Slurm's for clusters. Every field has one
line of help: it becomes the JSON schema that editors use. Keys that are still to come stand in
`planned`: using one is an error that says so, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainkit.jobs import sbatch
from trainkit.jobs.clusters import Cluster, SlurmOptions, refuse_unknown_options
from trainkit.jobs.containers import Container
from trainkit.jobs.data_phases import DataPhase, phase_objection, steps_by_phase
from trainkit.jobs.datasets import Dataset, Tokenizer
from trainkit.jobs.devices import Device
from trainkit.jobs.evaluations import EvaluationSettings, evaluation_objection, held_out_sets
from trainkit.jobs.job_tables import (
    CheckpointSettings,
    EngineSource,
    GenerateSettings,
    Parallelism,
    ProfileSettings,
    RetrySettings,
    WandbSettings,
)
from trainkit.jobs.models import Model, varlen_fits
from trainkit.jobs.notify import NotifySettings
from trainkit.jobs.rope_scaling import RopeScaling
from trainkit.jobs.sweeps import Sweep
from trainkit.jobs.table import NAME, EngineArguments, Environment, Strings, Table, needs, wrong
from trainkit.jobs.training import Training, native_float8

__all__ = [  # the tables that other packages name
    "NAME",
    "CheckpointSettings",
    "Cluster",
    "Container",
    "DataPhase",
    "Dataset",
    "Defaults",
    "EngineSource",
    "EvaluationSettings",
    "GenerateSettings",
    "Job",
    "Model",
    "NotifySettings",
    "Parallelism",
    "ProfileSettings",
    "RetrySettings",
    "RopeScaling",
    "Sweep",
    "Table",
    "Tokenizer",
    "Training",
    "WandbSettings",
]


class Job(Table):
    """One experiment, complete: after `trainkit.jobs` nobody reads jobs.toml or the environment
    again."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    description: str = Field("", description="one line: what it is and where it comes from")
    engine: Literal[
        "native",
        "gpt-neox",
        "megatron-bridge",
        "megatron-lm",
        "nemo",
        "neuronx-nemo",
        "torchtitan",
    ] = Field(
        "native",
        description="what is executed: trainkit's own trainer, or another engine as it is",
    )
    engine_source: EngineSource | None = Field(
        None,
        description=(
            "name of an [engines.X] table: where an engine that is not native comes from; by"
            " default the one named as the engine"
        ),
    )
    engine_args: EngineArguments = Field(
        default_factory=dict,
        description=(
            "further options of an engine that is not native, by its own names; native has none and"
            " reads none"
        ),
    )
    args: Strings = Field(
        (),
        description=(
            "words added to the engine's command line as they are (megatron-lm, megatron-bridge)"
        ),
    )
    precompile: bool = Field(
        False,
        description=(
            "native: graphs of compiled blocks are made before the ranks start (stage precompile);"
            " neuronx-nemo: compile the graphs of a few steps instead of training, as `invoke"
            " precompile` does"
        ),
    )
    rehearse: bool = Field(
        False, description="`train` rehearses the job first, as `invoke rehearse` does"
    )
    container: Container | None = Field(
        None, description="name of a [containers.X] table; none: without, where a base has one"
    )
    cluster: Cluster = Field(description="name of a [clusters.X] table")
    model: Model = Field(description="name of a [models.X] table")
    dataset: Dataset = Field(description="name of a [datasets.X] table, or 'mock'")
    nodes: int = Field(1, ge=1, description="nodes")
    parallelism: Parallelism = Field(default_factory=Parallelism)
    training: Training
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    generate: GenerateSettings = Field(default_factory=GenerateSettings)
    phases: Annotated[tuple[DataPhase, ...], Field(strict=False)] = Field(
        (),
        description=(
            "native: the end of training on other data, one [[jobs.X.phases]] after another, as"
            " annealing on better text; what their shares leave is trained on `dataset` before"
        ),
    )
    validation: dict[Annotated[str, Field(pattern=NAME)], Dataset] = Field(
        default_factory=dict,
        description=(
            "more validation sets: a name for each, and the [datasets.X] table whose valid split"
            " it is"
        ),
    )
    evaluations: Annotated[tuple[EvaluationSettings, ...], Field(strict=False)] = Field(
        (),
        description=(
            "native: what is measured of checkpoints while training goes on, one"
            " [[jobs.X.evaluations]] each: held-out sets, or tasks of lm-evaluation-harness"
        ),
    )
    recovery: Literal["warm", "cold"] = Field(
        "warm",
        description=(
            "native: warm: each host keeps a process that has imported everything, from which its"
            " ranks are forked; cold: every rank is a program that imports by itself"
        ),
    )
    kernels: Literal["auto", "reference", "fused"] = Field(
        "auto",
        description=(
            "what computes norms, activations, the loss and the update; fused: trainkit's own"
            " kernels, refused where they are not there; reference: plain torch; auto: fused where"
            " they are there (built on CPUs, Triton on GPUs), else plain torch"
        ),
    )
    sample_order: Literal["native", "megatron"] = Field(
        "native",
        description=(
            "native: nothing is built before the run; megatron: Megatron's own order of samples,"
            " whose index the stage `index` builds"
        ),
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description=(
            "weights to begin with: hf:NAME of the hub, hf:NAME@REVISION, or a Hugging Face folder"
        ),
    )
    profile: ProfileSettings | None = Field(None, description="profile a range of steps")
    wandb: WandbSettings | None = Field(None, description="report to Weights & Biases as well")
    retry: RetrySettings | None = Field(
        None,
        description=(
            "how often it goes on by itself after a failure; by default not at all on this machine"
        ),
    )
    notify: NotifySettings = Field(
        default_factory=NotifySettings,
        description="who is notified how it goes, over the [notify] of the file",
    )
    sweep: Sweep | None = Field(
        None, description="which values `invoke sweep` gives it, a run for each"
    )
    env: Environment = Field(
        default_factory=dict, description="environment variables of every rank, over the cluster's"
    )
    slurm: SlurmOptions = Field(
        default_factory=dict, description="long options of sbatch, over the cluster's"
    )
    resume: Literal["requeue", "chain", "never"] = Field(
        "requeue",
        description=(
            "slurm: how a run goes on after a time limit, a preemption or a lost node: the same job"
            " again, a successor that waits, not at all"
        ),
    )

    @field_validator("slurm")
    @classmethod
    def _known_to_sbatch(cls, value: SlurmOptions) -> SlurmOptions:
        return refuse_unknown_options(value)

    @model_validator(mode="after")
    def _source_is_of_the_engine(self) -> Job:
        source = self.engine_source
        if source is not None and not self.is_native and source.kind != self.engine:
            raise wrong(
                "engine_source",
                f"engine_source '{source.name}' is of engine {source.kind}, and engine ="
                f" '{self.engine}'",
            )
        if self.args and self.engine not in ("megatron-lm", "megatron-bridge"):
            raise wrong("args", f"args are Megatron's; engine = '{self.engine}' takes none")
        return self

    @model_validator(mode="after")
    def _fits_its_pods(self) -> Job:
        container = None if self.container is None else self.container.name
        self.cluster.refuse_in_pods(container, self.notify.secret_names)
        return self

    @model_validator(mode="after")
    def _further_datasets_share_the_tokenizer(self) -> Job:
        if "valid" in self.validation:
            raise wrong(
                "validation.valid",
                "validation.valid: that name is taken by the job's own dataset",
            )
        others = {f"validation.{name}": dataset for name, dataset in self.validation.items()}
        others |= {f"phases.{at}.dataset": each.dataset for at, each in enumerate(self.phases)}
        others |= dict(held_out_sets(self.evaluations))
        for key, dataset in others.items():
            if dataset.tokenizer != self.dataset.tokenizer:
                ours, theirs = (
                    d.tokenizer.name if d.tokenizer else "none" for d in (self.dataset, dataset)
                )
                raise wrong(
                    f"{key}.name",
                    f"{key}: tokenizer {theirs}, but dataset '{self.dataset.name}' has {ours}:"
                    " its ids are others, and losses cannot be compared",
                )
            if (
                dataset.tokenizer
                and dataset.tokenizer.type == "bpe"
                and dataset.name != self.dataset.name
            ):
                raise wrong(
                    f"{key}.name",
                    f"{key}: its tokenizer is trained on each dataset separately (type = 'bpe');"
                    " several datasets need type = 'file'",
                )
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> Job:
        if self.training.precision == "fp8" and not self.is_native:
            raise native_float8(self.engine)
        if self.phases and not self.is_native:
            raise wrong(
                "phases",
                f"phases are engine native's: engine = '{self.engine}' reads one dataset from its"
                " first step to its last; leave them out, or train with engine = 'native'",
            )
        said = phase_objection(self.dataset, self.phases, self.training.train_iters)
        if said is not None:
            raise said
        return self

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> Job:
        obstacle = "" if self.is_native else f"are engine native's, not '{self.engine}''s"
        if self.container is not None and not self.cluster.launcher_traits.pods:
            obstacle = "run outside of the job's container, where its packages are not"
        elif self.dataset.tokenizer is None:
            obstacle = f"need text, and dataset '{self.dataset.name}' is random tokens"
        if said := evaluation_objection(self.evaluations, self.training, obstacle):
            raise said
        return self

    @model_validator(mode="after")
    def _order_lasts(self) -> Job:
        """Megatron's order ends with training; a rollback goes on with later samples, so it
        would run out of them at the very end."""
        for key in ("on_nan", "on_spike") if self.sample_order == "megatron" else ():
            if getattr(self.training, key) == "rollback":
                message = (
                    f"training.{key} = 'rollback' needs samples beyond those that sample_order ="
                    " 'megatron' builds; use 'skip', or the native order"
                )
                raise wrong(f"training.{key}", message)
        if self.sample_order == "megatron" and self.training.seed >= 2**32:
            raise wrong(
                "training.seed",
                f"training.seed {self.training.seed} is 2^32 or more, which numpy's RandomState,"
                " and so sample_order = 'megatron', cannot take",
            )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> Job:
        t = self.training
        kernel = (
            self.cluster.device_type == "cuda"
            and t.precision != "fp32"
            and self.model.attention_dropout == 0
            and varlen_fits(self.model.head_size)
        )
        p = self.parallelism
        if t.compile and p.pipeline_schedule == "zbv":
            raise wrong(
                "training.compile",
                "training.compile and pipeline_schedule = 'zbv' exclude each other: a compiled"
                " backward cannot be split in two",
            )
        if (
            t.compile
            and self.model.attention_dropout > 0
            and p.tensor_model_parallel_size > 1
            and not p.sequence_parallel
        ):
            message = (
                "training.compile with attention_dropout and tensor parallelism needs"
                " sequence_parallel: without it two kinds of random numbers are drawn"
            )
            raise wrong(
                "training.compile",
                f"{message} by turns, between which a compiled block cannot change",
            )
        if t.recompute_granularity == "selective" and p.pipeline_schedule == "zbv":
            message = (
                "'selective' keeps what backward reads once, and pipeline_schedule = 'zbv' goes"
                " through it twice; use 'full' or 'none'"
            )
            raise wrong(
                "training.recompute_granularity", f"training.recompute_granularity = {message}"
            )
        if t.compile and t.reset_attention_mask and not kernel:
            message = (
                "training.compile with reset_attention_mask needs the variable-length kernel: a"
                " CUDA device, 16 bits, no attention_dropout, and heads of a multiple of 8 channels"
                " up to 256"
            )
            raise wrong(
                "training.compile",
                f"{message}; document by document, every batch would be compiled again",
            )
        if self.precompile and t.reset_attention_mask and self.is_native:
            message = (
                "precompile with training.reset_attention_mask: a graph is made for documents of"
                " given lengths, and those of a batch are not known before"
            )
            raise wrong("precompile", message)
        return self

    @model_validator(mode="after")
    def _fits_into_its_allocation(self) -> Job:
        if said := sbatch.signal_objection(self.sbatch_options):
            raise wrong("slurm.signal", said)
        tasks = str(self.sbatch_options.get("ntasks", self.nodes))
        if tasks.isdigit() and int(tasks) < self.nodes:
            raise wrong(
                "slurm.ntasks",
                f"slurm.ntasks = {tasks} is below nodes = {self.nodes}: Slurm gives no node"
                " without a task",
            )
        return self

    @model_validator(mode="after")
    def _has_vocabulary(self) -> Job:
        tokenizer = self.dataset.tokenizer
        vocab_size = self.model.vocab_size
        if tokenizer is None and vocab_size is None:
            raise needs(
                "dataset.name",
                f"dataset '{self.dataset.name}' has no tokenizer, so model '{self.model.name}'"
                " needs vocab_size",
            )
        if tokenizer and tokenizer.vocab_size and vocab_size and vocab_size < tokenizer.vocab_size:
            raise wrong(
                "model.vocab_size",
                f"model.vocab_size {vocab_size} is below dataset.tokenizer.vocab_size"
                f" {tokenizer.vocab_size}",
            )
        return self

    @property
    def is_native(self) -> bool:
        """Whether trainkit's own trainer runs it."""
        return self.engine == "native"

    @property
    def steps_by_phase(self) -> list[int]:
        """Steps on the job's own dataset, then those of each phase."""
        return steps_by_phase(self.phases, self.training.train_iters)

    @property
    def training_datasets(self) -> list[Dataset]:
        """What training reads, each once."""
        read = (self.dataset, *(phase.dataset for phase in self.phases))
        return list({dataset.name: dataset for dataset in read}.values())

    @property
    def datasets(self) -> list[Dataset]:
        """All that it reads, each once."""
        read = (*self.training_datasets, *self.validation.values())
        return list({dataset.name: dataset for dataset in read}.values())

    @property
    def prepared_datasets(self) -> list[Dataset]:
        """What its ranks read, and what its evaluations do, each once."""
        read = (*self.datasets, *(dataset for _, dataset in held_out_sets(self.evaluations)))
        return list({dataset.name: dataset for dataset in read}.values())

    @property
    def ranks_per_node(self) -> int:
        """Processes a node."""
        return self.cluster.ranks_per_node or max(1, self.cluster.gpus_per_node)

    @property
    def starts_by_srun(self) -> bool:
        """One srun starts the ranks in their image, and agents are outside of it."""
        source = self.engine_source
        return not self.is_native and source is not None and source.launch == "srun"

    @property
    def stop_grace(self) -> float:
        """Seconds from TERM to KILL of ranks that are stopped: 0 of our own trainer, which has
        nothing to save then."""
        return 0.0 if self.is_native else self.cluster.watch.grace

    @property
    def environment(self) -> dict[str, str]:
        """What jobs.toml puts into every rank's environment: the cluster's, the container's over
        it, the job's over that."""
        return {**self.cluster.env, **(self.container.env if self.container else {}), **self.env}

    @property
    def retries(self) -> RetrySettings:
        """Budgets of retries: as given; by default none where the ranks run on this machine
        only."""
        if self.retry is not None:
            return self.retry
        if self.cluster.launcher_traits.one_machine:
            return RetrySettings(infra=0, hang=0)
        return RetrySettings()

    @property
    def sbatch_options(self) -> SlurmOptions:
        """Long options of sbatch: the job's over the cluster's; pods have none."""
        if self.cluster.launcher_traits.pods:
            return {}
        return {**self.cluster.slurm, **self.slurm}

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel_size(self) -> int:
        """Ranks over tensor, context and pipeline degrees (at least 1, rounded down where the
        plan objects)."""
        return max(1, self.world_size // self.parallelism.ranks_of_a_sample)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, as given or derived."""
        t = self.training
        if t.global_batch_size is not None:
            return t.global_batch_size
        return t.micro_batch_size * self.data_parallel_size * (t.gradient_accumulation_steps or 1)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step on one rank (rounded down where the plan objects)."""
        return max(
            1, self.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size)
        )


class Defaults(Table):
    """The [defaults] table of jobs.toml."""

    job: str | None = Field(None, description="the job that tasks without one serve")


TABLES: dict[str, type[Table]] = {
    "clusters": Cluster,
    "devices": Device,
    "containers": Container,
    "engines": EngineSource,
    "tokenizers": Tokenizer,
    "datasets": Dataset,
    "models": Model,
    "jobs": Job,
}
