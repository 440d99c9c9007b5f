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

from trainkit.jobs.devices import DEVICES

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
    device: str = Field("cpu", description="what ranks compute on: cpu, cuda (any GPU), or a row of the device table, whose peak MFU then names")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of one node")
    ranks_per_node: int | None = Field(None, ge=1, description="processes a node; by default gpus_per_node, at least 1")
    root: str | None = Field(None, description="folder for runs, code snapshots and data; by default that of jobs.toml")
    hub_endpoint: str | None = Field(None, pattern=r"^https?://[^@\s]+$", description="where hf:NAME is fetched from; by default the public hub")
    env: Environment = Field(default_factory=dict, description="environment variables of every rank")
    secrets: SecretNames = Field((), description="names of secret variables taken from the caller's environment; '?' at the end: optional")

    @model_validator(mode="after")
    def _known(self) -> Cluster:
        if self.device not in DEVICES and self.device not in ("cpu", "cuda"):
            raise _wrong("device", f"device '{self.device}' is not in the device table: cpu, cuda, {', '.join(DEVICES)}")
        return self

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """torch's name for the kind of device."""
        return "cpu" if self.device == "cpu" else "cuda"


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


class RopeScaling(Table):
    """How rotary positions are stretched beyond the length a model was first trained on. Keys are Hugging Face's."""

    type: Literal["linear", "llama3"] = Field(description="linear: every position divided by factor; llama3: only low frequencies (Llama 3.1)")
    factor: float = Field(gt=1, description="how many times longer")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths above original_max_position_embeddings / this are divided in full")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths below original_max_position_embeddings / this stay as they are")
    original_max_position_embeddings: int = Field(8192, ge=1, description="llama3: the length before stretching")

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise _wrong("high_freq_factor", f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor {self.low_freq_factor}")
        return self


InitMethod = Literal["normal", "scaled", "small_init", "wang_init"]


class Model(Table):
    """The shape of a model. What is left out has its family's usual value, which the properties below give."""

    FAMILY_KEYS: ClassVar[dict[str, tuple[str, ...]]] = {
        "num_query_groups": ("llama",),
        "rotary_percent": ("gpt-neox",),
        "rotary_base": ("gpt-neox", "llama"),
        "rope_scaling": ("llama",),
        "gpt_j_residual": ("gpt-neox",),
        "gpt_j_tied": ("gpt-neox",),
        "gelu": ("gpt", "gpt-neox"),
    }

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    family: Literal["gpt", "gpt-neox", "llama"] = Field(
        "gpt", description="gpt: learned positions, tied; gpt-neox: rotary, parallel residual; llama: RMSNorm, SwiGLU, grouped queries"
    )
    num_layers: int = Field(ge=1, description="transformer blocks")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(ge=1, description="attention heads; must divide hidden_size unless kv_channels is given")
    num_query_groups: int | None = Field(None, ge=1, description="heads of keys and values (llama); by default num_attention_heads")
    kv_channels: int | None = Field(None, ge=1, description="channels of a head; by default hidden_size / num_attention_heads")
    ffn_hidden_size: int | None = Field(None, ge=1, description="width of the MLP; by default 4 * hidden_size, llama: two thirds of it in steps of 64")
    seq_length: int = Field(ge=1, description="tokens of one sample")
    max_position_embeddings: int | None = Field(None, ge=1, description="learned positions, or the longest text rotary ones are for; by default seq_length")
    vocab_size: int | None = Field(None, ge=2, description="by default that of the dataset's tokenizer")
    make_vocab_size_divisible_by: int = Field(
        128, ge=1, description="the head's product is padded to such a multiple; padding is never sampled, saved or in the loss"
    )
    untie_embeddings_and_output_weights: bool | None = Field(None, description="a head of its own; by default false for gpt, true for the others")
    rotary_percent: float | None = Field(None, gt=0, le=1, description="part of a head's channels that is rotated (gpt-neox); by default 0.25")
    rotary_base: float | None = Field(None, gt=1, description="theta of rotary positions; by default 10000")
    rope_scaling: RopeScaling | None = Field(None, description="stretching of rotary positions (llama)")
    gpt_j_residual: bool | None = Field(None, description="attention and MLP side by side (gpt-neox); by default true")
    gpt_j_tied: bool = Field(False, description="attention and MLP share one norm (gpt-neox with gpt_j_residual)")
    gelu: Literal["tanh", "exact"] | None = Field(None, description="form of GELU; by default tanh for gpt, exact for gpt-neox (20B was trained with tanh)")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings and of what is added to the residual stream")
    init_method: InitMethod = Field("normal", description="normal: init_method_std; small_init: sqrt(2 / (5 * hidden_size))")
    output_layer_init_method: InitMethod = Field(
        "scaled", description="of output projections; scaled: init_method_std / sqrt(2 * num_layers); wang_init: 2 / (num_layers * sqrt(hidden_size))"
    )
    init_method_std: float = Field(0.02, gt=0, description="standard deviation of initial weights under normal and scaled")
    layernorm_epsilon: float = Field(1e-5, gt=0, description="epsilon of LayerNorm and RMSNorm")

    @model_validator(mode="after")
    def _fits(self) -> Model:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise _wrong("num_attention_heads", f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}")
        if self.num_attention_heads % self.query_groups:
            raise _wrong("num_query_groups", f"num_attention_heads {self.num_attention_heads} does not divide by num_query_groups {self.num_query_groups}")
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise _wrong("max_position_embeddings", f"max_position_embeddings {self.max_position_embeddings} is below seq_length {self.seq_length}")
        for key, families in self.FAMILY_KEYS.items():
            if getattr(self, key) and self.family not in families:
                raise _wrong(key, f"{key} is for family {' and '.join(families)}, not {self.family!r}")
        if self.gpt_j_tied and not self.parallel_residual:
            raise _wrong("gpt_j_tied", "gpt_j_tied needs gpt_j_residual: one after the other, attention and MLP see different inputs")
        if self.family != "gpt" and (self.rotary_channels % 2 or not self.rotary_channels):
            raise _wrong("rotary_percent", f"{self.rotary_channels} of {self.head_size} channels would be rotated; rotary positions turn pairs of channels")
        return self

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the MLP. Llama's default is Megatron's for SwiGLU: two thirds of 4 * hidden_size, rounded down to a multiple of 64."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return max(64, 8 * self.hidden_size // 3 // 64 * 64) if self.family == "llama" else 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Longest text the model can read."""
        return self.max_position_embeddings or self.seq_length

    @property
    def untied(self) -> bool:
        """Whether the head has a weight of its own."""
        given = self.untie_embeddings_and_output_weights
        return self.family != "gpt" if given is None else given

    @property
    def parallel_residual(self) -> bool:
        """Whether attention and MLP read the same residual stream."""
        return self.family == "gpt-neox" and self.gpt_j_residual is not False

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that are rotated; 0 for learned positions. Rounded down as GPT-NeoX does: int(head_size * rotary_percent)."""
        if self.family == "gpt":
            return 0
        return int(self.head_size * (self.rotary_percent or 0.25)) if self.family == "gpt-neox" else self.head_size


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
    rampup_batch_size: Annotated[tuple[int, int, int] | None, Field(strict=False)] = Field(
        None, description="[start, increment, samples]: the global batch grows from start in equal steps over so many samples, as Megatron's"
    )
    train_iters: int = Field(ge=1, description="optimizer steps")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="adam: AdamW; sgd: with sgd_momentum")
    lr: float = Field(ge=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = Field("cosine", description="shape of the decay")
    lr_decay_iters: int | None = Field(None, ge=1, description="steps until min_lr is reached; by default train_iters")
    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warmup")
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1, description="warmup as a part of lr_decay_iters, instead of lr_warmup_iters")
    lr_warmup_init: float = Field(0.0, ge=0, description="learning rate at which the warmup begins")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field("exponential", description="WSD: shape of the last part")
    lr_wsd_decay_iters: int | None = Field(None, ge=1, description="WSD: steps of the last part, in which the rate falls")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay; not on biases and norms")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    clip_grad: float = Field(1.0, ge=0, description="highest global gradient norm; 0: no clipping")
    z_loss: float = Field(0.0, ge=0, description="weight of the mean square of log(sum(exp(logits))) added to the loss (PaLM: 1e-4)")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic; weights and optimizer state are fp32 in all of them")
    loss_scale: float | None = Field(None, gt=0, description="fp16: a fixed loss scale instead of a dynamic one")
    initial_loss_scale: float = Field(2.0**32, gt=0, description="fp16: the dynamic loss scale at the start (2**initial_scale_power)")
    min_loss_scale: float = Field(1.0, gt=0, description="fp16: the dynamic loss scale falls no lower")
    loss_scale_window: int = Field(1000, ge=1, description="fp16: steps without overflow after which the scale doubles")
    hysteresis: int = Field(2, ge=1, description="fp16: overflows before the scale halves")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop", description="after a loss or gradient norm that is not finite; the weights are never touched by it"
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = Field("ignore", description="after a loss above spike_factor times its running mean")
    spike_factor: float = Field(2.0, gt=1, description="how many times the running mean is a spike")
    spike_window: int = Field(128, ge=2, description="steps the running mean looks back; none is a spike before it is full")
    max_skipped_in_a_row: int = Field(50, ge=1, description="steps skipped one after another until training stops all the same")
    max_rollbacks: int = Field(3, ge=1, description="rollbacks until training stops all the same")
    recompute_granularity: Literal["none", "full", "selective"] = Field(
        "none", description="activations computed anew in backward: of whole blocks, or all but matrix products and attention"
    )
    recompute_every: int = Field(1, ge=1, description="recompute every n-th block only")
    compile: bool = Field(False, description="torch.compile every block; for GPUs")
    reset_attention_mask: bool = Field(False, description="tokens attend within their own document only")
    reset_position_ids: bool = Field(False, description="positions begin anew in every document")
    eod_mask_loss: bool = Field(False, description="the end-of-document token as input gives no loss")
    seed: int = Field(1234, ge=0, lt=2**63, description="seeds initial weights, dropout and the order of samples")
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
        if self.lr_warmup_init > self.lr:
            raise _wrong("lr_warmup_init", f"lr_warmup_init {self.lr_warmup_init} is above lr {self.lr}")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise _wrong("lr_warmup_fraction", "lr_warmup_iters and lr_warmup_fraction are both given; one is derived from the other")
        if self.lr_decay_style == "WSD" and (self.lr_wsd_decay_iters is None or self.lr_wsd_decay_iters > self.decay_iters - self.warmup_iters):
            raise _needs("lr_wsd_decay_iters", f"lr_decay_style = 'WSD' needs lr_wsd_decay_iters, up to {self.decay_iters - self.warmup_iters}")
        if self.recompute_every > 1 and self.recompute_granularity != "full":
            raise _wrong("recompute_every", "recompute_every is for recompute_granularity = 'full'")
        if self.loss_scale is not None and self.precision != "fp16":
            raise _wrong("loss_scale", f"loss_scale is for precision = 'fp16', not {self.precision!r}")
        if self.min_loss_scale > self.initial_loss_scale:
            raise _wrong("min_loss_scale", f"min_loss_scale {self.min_loss_scale} is above initial_loss_scale {self.initial_loss_scale}")
        self._check_rampup()
        return self

    def _check_rampup(self) -> None:
        """Megatron-LM, core/num_microbatches_calculator.py RampupBatchsizeNumMicroBatchesCalculator: what it asserts."""
        if self.rampup_batch_size is None:
            return
        start, increment, samples = self.rampup_batch_size
        total = self.global_batch_size
        if total is None:
            raise _needs("rampup_batch_size", "rampup_batch_size needs global_batch_size, the batch it grows to")
        if min(start, increment) < 1 or samples < 0 or start > total or (total - start) % increment:
            raise _wrong("rampup_batch_size", f"rampup_batch_size: {start} does not grow to global_batch_size {total} in steps of {increment}")

    @property
    def decay_iters(self) -> int:
        """Steps until min_lr is reached."""
        return self.lr_decay_iters or self.train_iters

    @property
    def warmup_iters(self) -> int | float:
        """Steps of warmup; a fraction of lr_decay_iters need not be whole, as in Megatron."""
        return self.lr_warmup_iters if self.lr_warmup_fraction is None else self.lr_warmup_fraction * self.decay_iters


class Checkpoint(Table):
    """What is kept on disk."""

    keep_last: int = Field(2, ge=1, description="newest checkpoints kept; older ones are deleted after a save")


class Generate(Table):
    """The sample printed when training ends."""

    prompt: str = Field("", description="text the sample goes on from; empty: from the end-of-document token")
    max_new_tokens: int = Field(64, ge=1, description="tokens of the sample")


class Profile(Table):
    """Which steps torch's profiler looks at; traces go to profile/ in the run folder."""

    start: int = Field(ge=1, description="first step that is profiled")
    stop: int = Field(ge=1, description="last step that is profiled")
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = Field((0,), description="ranks that are profiled")

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        if self.stop < self.start:
            raise _wrong("stop", f"stop {self.stop} is before start {self.start}")
        return self


class Wandb(Table):
    """Metrics to Weights & Biases as well (needs the extra `wandb`); the run's id there is its id here, so a resumed run goes on."""

    project: str = Field(min_length=1, description="the W&B project")
    entity: str | None = Field(None, description="the W&B team or user; by default that of the key")
    group: str | None = Field(None, description="the W&B group")
    mode: Literal["online", "offline"] = Field("online", description="offline: only files, for `wandb sync` later")


class Job(Table):
    """One experiment, complete: after `trainkit.jobs` nobody reads jobs.toml or the environment again."""

    planned = ("engine_args", "container", "retry", "resume", "sample_order", "kernels", "precompile")

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
    validation: dict[Annotated[str, Field(pattern=NAME)], Dataset] = Field(
        default_factory=dict, description="more validation sets: a name for each, and the [datasets.X] table whose valid split it is"
    )
    init_from: str | None = Field(None, min_length=1, description="weights to begin with: hf:NAME of the hub, hf:NAME@REVISION, or a Hugging Face folder")
    profile: Profile | None = Field(None, description="profile a range of steps")
    wandb: Wandb | None = Field(None, description="report to Weights & Biases as well")
    env: Environment = Field(default_factory=dict, description="environment variables of every rank, over the cluster's")

    @model_validator(mode="after")
    def _validation_sets_share_the_tokenizer(self) -> Job:
        for name, dataset in self.validation.items():
            if name == "valid":
                raise _wrong("validation.valid", "validation.valid: that name is taken by the job's own dataset")
            if dataset.tokenizer != self.dataset.tokenizer:
                ours, theirs = (d.tokenizer.name if d.tokenizer else "none" for d in (self.dataset, dataset))
                raise _wrong(
                    f"validation.{name}", f"validation.{name}: tokenizer {theirs}, but dataset '{self.dataset.name}' has {ours}; losses cannot be compared"
                )
            if dataset.tokenizer and dataset.tokenizer.type == "bpe" and dataset.name != self.dataset.name:
                raise _wrong(
                    f"validation.{name}",
                    f"validation.{name}: its tokenizer is trained on each dataset anew (type = 'bpe'); several datasets need type = 'file'",
                )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> Job:
        t = self.training
        kernel = self.cluster.device_type == "cuda" and t.precision != "fp32" and self.model.attention_dropout == 0
        if t.compile and t.reset_attention_mask and not kernel:
            message = "training.compile with reset_attention_mask needs the variable-length kernel: a CUDA device, 16 bits and no attention_dropout"
            raise _wrong("training.compile", f"{message}; document by document, every batch would be compiled anew")
        return self

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
TABLES_OF_REFERENCES = {"jobs": {"validation": "datasets"}}  # keys that hold tables whose values are such names
PLANNED_TABLES = ("engines", "containers", "devices", "include")
MOCK_DATASET = {"source": "mock", "split": "90,10,0"}
