"""What an experiment is: the tables of jobs.toml and the resolved Job, as frozen pydantic models.

Key names are Megatron's for models and training and Slurm's for clusters. Every field has one line of help: it becomes
the JSON schema that editors use. What is still to come stands in `planned` (keys) and `ToCome` (values): using it is
refused with words, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

NAME = r"^[a-z0-9][a-z0-9_-]*$"


@dataclass(frozen=True)
class ToCome:
    """Values of a key that a later version will take: those listed, and integers above a limit."""

    values: tuple[str | int, ...] = ()
    above: int | None = None

    def includes(self, value: object) -> bool:
        """Whether `value` is one of them."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value in self.values or (self.above is not None and value > self.above)
        return isinstance(value, str) and value in self.values


_ABOVE_ONE = ToCome(above=1)
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*"
Strings = Annotated[tuple[str, ...], Field(strict=False)]  # not strict: TOML and JSON have lists, not tuples
SecretNames = Annotated[tuple[Annotated[str, Field(pattern=_VARIABLE + r"\??$")], ...], Field(strict=False)]
Environment = dict[Annotated[str, Field(pattern=_VARIABLE + "$")], str]


def _wrong(key: str, message: str) -> PydanticCustomError:
    """An error of a rule between keys, reported where `key` was written."""
    return PydanticCustomError("rule", "{message}", {"key": key, "message": message})


def _needs(key: str, message: str) -> PydanticCustomError:
    """As `_wrong`, for a rule that something is missing: not asked of a table that others extend."""
    return PydanticCustomError("needs", "{message}", {"key": key, "message": message})


class Table(BaseModel):
    """A table of jobs.toml: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    planned: ClassVar[tuple[str, ...]] = ()  # keys that a later version will take


class Cluster(Table):
    """Where jobs run."""

    planned = ("hostfile", "prolog", "slurm", "stages", "filesystems", "retry", "spares")

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    launcher: Annotated[Literal["local"], ToCome(("ssh", "pdsh", "slurm"))] = Field(
        "local", description="how ranks are started; ssh, pdsh and slurm are to come"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="what ranks compute on")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of one node")
    ranks_per_node: int | None = Field(None, ge=1, description="processes a node; by default gpus_per_node, at least 1")
    root: str | None = Field(None, description="folder for runs, code snapshots and data; by default that of jobs.toml")
    env: Environment = Field(default_factory=dict, description="environment variables of every rank")
    secrets: SecretNames = Field((), description="names of secret variables taken from the caller's environment; '?' at the end: optional")


class Tokenizer(Table):
    """How text becomes ids."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    type: Literal["bpe", "file"] = Field("bpe", description="bpe: a byte-level BPE trained on the dataset; file: a tokenizer.json")
    vocab_size: int | None = Field(None, ge=257, le=2**31 - 1, description="ids of the trained BPE, the end-of-document id included")
    path: str | None = Field(None, description="type = file: the tokenizer.json, relative to the folder of jobs.toml")
    training_bytes: int = Field(2**27, ge=1, description="characters of text that a BPE is trained on, from the start of the corpus")
    eod_token: str = Field("<|endoftext|>", min_length=1, description="the token that ends every document")

    @model_validator(mode="after")
    def _complete(self) -> Tokenizer:
        if self.type == "bpe" and self.vocab_size is None:
            raise _needs("type", "type = 'bpe' needs vocab_size")
        if self.type == "file" and self.path is None:
            raise _needs("type", "type = 'file' needs path")
        return self


class Dataset(Table):
    """A corpus, its tokenizer and its split."""

    planned = ("on_error",)

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    source: Literal["stdlib", "files", "mock"] = Field(description="stdlib: Python's own source files; files: local .jsonl or .jsonl.zst; mock: random tokens")
    paths: Strings = Field((), description="source = files: files or glob patterns, relative to the folder of jobs.toml")
    text_key: str = Field("text", min_length=1, description="the key of a JSON line that holds the text")
    tokenizer: Tokenizer | None = Field(None, description="name of a [tokenizers.X] table")
    split: str = Field("969,30,1", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$", description="weights of train, valid and test, as Megatron's --split")
    shard_bytes: int = Field(2**22, ge=2**16, description="text bytes of one shard that source = stdlib writes")

    @model_validator(mode="after")
    def _complete(self) -> Dataset:
        if self.source == "files" and not self.paths:
            raise _needs("source", "source = 'files' needs paths")
        if self.source != "mock" and self.tokenizer is None:
            raise _needs("source", f"source = '{self.source}' needs tokenizer")
        if float(self.split.split(",")[0]) == 0:
            raise _wrong("split", f"split '{self.split}' leaves no tokens to train on")
        return self


class Model(Table):
    """The shape of a model."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    family: Annotated[Literal["gpt"], ToCome(("gpt-neox", "llama"))] = Field("gpt", description="gpt: learned positions, LayerNorm, GELU, tied embeddings")
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
            raise _wrong("num_attention_heads", f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}")
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise _wrong("max_position_embeddings", f"max_position_embeddings {self.max_position_embeddings} is below seq_length {self.seq_length}")
        return self


class Parallelism(Table):
    """How the ranks share the work. Data-parallel size is what remains of the world."""

    tensor_model_parallel_size: Annotated[int, _ABOVE_ONE] = Field(1, ge=1, le=1, description="tensor-parallel size; above 1 is to come")
    pipeline_model_parallel_size: Annotated[int, _ABOVE_ONE] = Field(1, ge=1, le=1, description="pipeline stages; above 1 is to come")
    zero_stage: Annotated[int, ToCome((0, 2, 3))] = Field(
        1, ge=1, le=1, description="1: parameters gathered once, gradients reduced at the last micro-batch, optimizer state sharded"
    )


class Training(Table):
    """How long, how fast, how exact."""

    micro_batch_size: int = Field(1, ge=1, description="samples of one forward pass on one data-parallel rank")
    global_batch_size: int | None = Field(None, ge=1, description="samples of one optimizer step over all ranks")
    gradient_accumulation_steps: int | None = Field(None, ge=1, description="micro-batches of one step; give this or global_batch_size, not both")
    train_iters: int = Field(ge=1, description="optimizer steps")
    lr: float = Field(ge=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_decay_style: Annotated[Literal["cosine"], ToCome(("constant", "linear", "inverse-square-root", "WSD"))] = Field(
        "cosine", description="shape of the decay"
    )
    lr_decay_iters: int | None = Field(None, ge=1, description="steps until min_lr is reached; by default train_iters")
    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warmup")
    optimizer: Annotated[Literal["adam"], ToCome(("sgd",))] = Field("adam", description="adam: AdamW")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; not on biases and norms")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    clip_grad: float = Field(1.0, ge=0, description="highest global gradient norm; 0: no clipping")
    precision: Annotated[Literal["fp32"], ToCome(("bf16", "fp16"))] = Field("fp32", description="arithmetic; bf16 and fp16 are to come")
    seed: int = Field(1234, ge=0, lt=2**63, description="seeds initial weights and the order of samples")
    log_interval: int = Field(1, ge=1, description="steps between log lines and rows of metrics.jsonl")
    eval_interval: int | None = Field(None, ge=1, description="steps between evaluations; one is always made at the end")
    eval_iters: int = Field(10, ge=0, description="global batches of one evaluation; 0: none")
    save_interval: int | None = Field(None, ge=1, description="steps between checkpoints; one is always written at the end")

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise _wrong("gradient_accumulation_steps", "global_batch_size and gradient_accumulation_steps are both given; one is derived from the other")
        if self.min_lr > self.lr:
            raise _wrong("min_lr", f"min_lr {self.min_lr} is above lr {self.lr}")
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

    planned = ("engine_args", "container", "retry", "resume", "sample_order", "kernels", "precompile", "profile", "init_from")

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    description: str = Field("", description="one line: what it is and where it comes from")
    engine: Annotated[Literal["native"], ToCome(("gpt-neox", "megatron-lm", "nemo", "neuronx-nemo"))] = Field(
        "native", description="what is executed; gpt-neox, megatron-lm, nemo and neuronx-nemo are to come"
    )
    cluster: Cluster = Field(description="name of a [clusters.X] table")
    model: Model = Field(description="name of a [models.X] table")
    dataset: Dataset = Field(description="name of a [datasets.X] table, or 'mock'")
    nodes: Annotated[int, _ABOVE_ONE] = Field(1, ge=1, le=1, description="nodes; above 1 is to come")
    parallelism: Parallelism = Field(default_factory=Parallelism)
    training: Training
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    generate: Generate = Field(default_factory=Generate)
    env: Environment = Field(default_factory=dict, description="environment variables of every rank, over the cluster's")

    @model_validator(mode="after")
    def _has_vocabulary(self) -> Job:
        tokenizer, vocab_size = self.dataset.tokenizer, self.model.vocab_size
        if tokenizer is None and vocab_size is None:
            raise _needs("dataset.name", f"dataset '{self.dataset.name}' has no tokenizer, so model '{self.model.name}' needs vocab_size")
        if tokenizer and tokenizer.vocab_size and vocab_size and vocab_size < tokenizer.vocab_size:
            raise _wrong("model.vocab_size", f"model.vocab_size {vocab_size} is below dataset.tokenizer.vocab_size {tokenizer.vocab_size}")
        return self

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


class Defaults(Table):
    """The [defaults] table of jobs.toml."""

    job: str | None = Field(None, description="the job that tasks without one serve")


TABLES: dict[str, type[Table]] = {"clusters": Cluster, "tokenizers": Tokenizer, "datasets": Dataset, "models": Model, "jobs": Job}
REFERENCES = {"jobs": {"cluster": "clusters", "model": "models", "dataset": "datasets"}, "datasets": {"tokenizer": "tokenizers"}}
PLANNED_TABLES = ("engines", "containers", "devices", "include")
MOCK_DATASET = {"source": "mock", "split": "90,10,0"}
