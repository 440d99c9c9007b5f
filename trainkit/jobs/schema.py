"""What an experiment is: the tables of jobs.toml and the resolved Job, as frozen pydantic models.

Key names are Megatron's for models and training and Slurm's for clusters. Every field has one line of help: it becomes
the JSON schema that editors use. Keys of features that are still to come are `Planned`: setting one is refused with
words, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

NAME = r"^[a-z0-9][a-z0-9_-]*$"


def _refuse(value: Any) -> Any:
    raise PydanticCustomError("planned", "is planned but not in this version of trainkit; remove it")


Planned = Annotated[Any, AfterValidator(_refuse)]


class Table(BaseModel):
    """A table of jobs.toml: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Cluster(Table):
    """Where jobs run."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    launcher: Literal["local"] = Field("local", description="how ranks are started; ssh, pdsh and slurm are to come")
    device: Literal["cpu", "cuda"] = Field("cpu", description="what ranks compute on")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of one node")
    ranks_per_node: int | None = Field(None, ge=1, description="processes a node; by default gpus_per_node, at least 1")
    root: str | None = Field(None, description="folder for runs, code snapshots and data; by default that of jobs.toml")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank")
    secrets: tuple[str, ...] = Field((), description="names of secret variables taken from the caller's environment; '?' at the end: optional")
    hostfile: Planned = None
    prolog: Planned = None
    slurm: Planned = None
    stages: Planned = None
    filesystems: Planned = None
    retry: Planned = None
    spares: Planned = None


class Tokenizer(Table):
    """How text becomes ids."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    type: Literal["bpe", "file"] = Field("bpe", description="bpe: a byte-level BPE trained on the dataset; file: a tokenizer.json")
    vocab_size: int | None = Field(None, ge=257, le=2**31 - 1, description="ids of the trained BPE, the end-of-document id included")
    path: str | None = Field(None, description="type = file: the tokenizer.json, relative to the folder of jobs.toml")
    eod_token: str = Field("<|endoftext|>", min_length=1, description="the token that ends every document")

    @model_validator(mode="after")
    def _complete(self) -> Tokenizer:
        if self.type == "bpe" and self.vocab_size is None:
            raise PydanticCustomError("needs", "type = 'bpe' needs vocab_size")
        if self.type == "file" and self.path is None:
            raise PydanticCustomError("needs", "type = 'file' needs path")
        return self


class Dataset(Table):
    """A corpus, its tokenizer and its split."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    source: Literal["stdlib", "files", "mock"] = Field(description="stdlib: Python's own source files; files: local .jsonl or .jsonl.zst; mock: random tokens")
    paths: tuple[str, ...] = Field((), description="source = files: files or glob patterns, relative to the folder of jobs.toml")
    text_key: str = Field("text", min_length=1, description="the key of a JSON line that holds the text")
    tokenizer: Tokenizer | None = Field(None, description="name of a [tokenizers.X] table")
    split: str = Field("969,30,1", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$", description="weights of train, valid and test, as Megatron's --split")
    shard_bytes: int = Field(2**22, ge=2**16, description="text bytes of one shard that source = stdlib writes")
    on_error: Planned = None

    @model_validator(mode="after")
    def _complete(self) -> Dataset:
        if self.source == "files" and not self.paths:
            raise PydanticCustomError("needs", "source = 'files' needs paths")
        if self.source != "mock" and self.tokenizer is None:
            raise PydanticCustomError("needs", f"source = '{self.source}' needs tokenizer")
        return self


class Model(Table):
    """The shape of a model."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    family: Literal["gpt", "gpt-neox", "llama"] = Field("gpt", description="gpt: learned positions, LayerNorm, GELU, tied embeddings")
    num_layers: int = Field(ge=1, description="transformer blocks")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(ge=1, description="attention heads; must divide hidden_size")
    ffn_hidden_size: int | None = Field(None, ge=1, description="width of the MLP; by default 4 * hidden_size")
    seq_length: int = Field(ge=1, description="tokens of one sample")
    max_position_embeddings: int | None = Field(None, ge=1, description="learned positions; by default seq_length")
    vocab_size: int | None = Field(None, ge=2, description="by default that of the dataset's tokenizer")
    untie_embeddings_and_output_weights: bool = Field(False, description="a head of its own instead of the embedding's weight")
    init_method_std: float = Field(0.02, gt=0, description="standard deviation of initial weights; output projections have it divided by sqrt(2 * num_layers)")
    layernorm_epsilon: float = Field(1e-5, gt=0, description="epsilon of LayerNorm")

    @model_validator(mode="after")
    def _divides(self) -> Model:
        if self.hidden_size % self.num_attention_heads:
            raise PydanticCustomError("heads", f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}")
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise PydanticCustomError("positions", f"max_position_embeddings {self.max_position_embeddings} is below seq_length {self.seq_length}")
        return self


class Parallelism(Table):
    """How the ranks share the work. Data-parallel size is what remains of the world."""

    tensor_model_parallel_size: Literal[1] = Field(1, description="tensor-parallel size; above 1 is to come")
    pipeline_model_parallel_size: Literal[1] = Field(1, description="pipeline stages; above 1 is to come")
    zero_stage: Literal[1] = Field(1, description="1: parameters gathered once, gradients reduced at the last micro-batch, optimizer state sharded")


class Training(Table):
    """How long, how fast, how exact."""

    micro_batch_size: int = Field(1, ge=1, description="samples of one forward pass on one data-parallel rank")
    global_batch_size: int | None = Field(None, ge=1, description="samples of one optimizer step over all ranks")
    gradient_accumulation_steps: int | None = Field(None, ge=1, description="micro-batches of one step; give this or global_batch_size, not both")
    train_iters: int = Field(ge=1, description="optimizer steps")
    lr: float = Field(ge=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["cosine"] = Field("cosine", description="shape of the decay")
    lr_decay_iters: int | None = Field(None, ge=1, description="steps until min_lr is reached; by default train_iters")
    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warmup")
    optimizer: Literal["adam"] = Field("adam", description="adam: AdamW")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; not on biases and norms")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    clip_grad: float = Field(1.0, ge=0, description="highest global gradient norm; 0: no clipping")
    precision: Literal["fp32"] = Field("fp32", description="arithmetic; bf16 and fp16 are to come")
    seed: int = Field(1234, ge=0, lt=2**63, description="seeds initial weights and the order of samples")
    log_interval: int = Field(1, ge=1, description="steps between log lines and rows of metrics.jsonl")
    eval_interval: int | None = Field(None, ge=1, description="steps between evaluations; one is always made at the end")
    eval_iters: int = Field(10, ge=0, description="global batches of one evaluation; 0: none")
    save_interval: int | None = Field(None, ge=1, description="steps between checkpoints; one is always written at the end")

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise PydanticCustomError("batch", "global_batch_size and gradient_accumulation_steps are both given; one is derived from the other")
        if self.min_lr > self.lr:
            raise PydanticCustomError("lr", f"min_lr {self.min_lr} is above lr {self.lr}")
        return self


class Checkpoint(Table):
    """What is kept on disk."""

    keep_last: int = Field(2, ge=1, description="newest checkpoints kept; older ones are deleted after a save")


class Generate(Table):
    """The sample printed when training ends."""

    prompt: str = Field("", description="text the sample goes on from; empty: from the end-of-document token")
    max_new_tokens: int = Field(64, ge=1, description="tokens of the sample")


class Job(Table):
    """One experiment, complete: after `trainkit.jobs` nobody reads jobs.toml or the environment again."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    description: str = Field("", description="one line: what it is and where it comes from")
    engine: Literal["native"] = Field("native", description="what is executed; gpt-neox, megatron-lm, nemo and neuronx-nemo are to come")
    cluster: Cluster = Field(description="name of a [clusters.X] table")
    model: Model = Field(description="name of a [models.X] table")
    dataset: Dataset = Field(description="name of a [datasets.X] table, or 'mock'")
    nodes: int = Field(1, ge=1, le=1, description="nodes; above 1 is to come")
    parallelism: Parallelism = Field(default_factory=Parallelism)
    training: Training
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    generate: Generate = Field(default_factory=Generate)
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank, over the cluster's")
    engine_args: Planned = None
    container: Planned = None
    retry: Planned = None
    resume: Planned = None
    sample_order: Planned = None
    kernels: Planned = None
    precompile: Planned = None
    profile: Planned = None
    init_from: Planned = None

    @property
    def ranks_per_node(self) -> int:
        """Processes a node."""
        return self.cluster.ranks_per_node or max(1, self.cluster.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel_size(self) -> int:
        """Ranks over tensor and pipeline degrees."""
        p = self.parallelism
        return self.world_size // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size)

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
        return max(1, self.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size))


TABLES: dict[str, type[Table]] = {"clusters": Cluster, "tokenizers": Tokenizer, "datasets": Dataset, "models": Model, "jobs": Job}
PLANNED_TABLES = ("engines", "containers", "devices", "include")
MOCK_DATASET = {"source": "mock", "split": "90,10,0"}
