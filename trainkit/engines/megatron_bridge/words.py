"""The words of Megatron-Bridge's scripts/training/run_recipe.py, from a job: what Megatron-LM's
command line says, as the fields that Bridge has for its options.

Sources: Megatron-Bridge 0.6.0, scripts/training/run_recipe.py and recipe_runner.py,
src/megatron/bridge/recipes/gpt/h100/vanilla_gpt.py (a GPT with the defaults of pretrain_gpt.py),
training/config.py and training/mixed_precision.py; megatron/training/argument_utils.py and
arguments.py of its 3rdparty/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.hydra_words import Override
from trainkit.engines.megatron_lm.argv import (
    NO_COUNTERPART as MEGATRON_NO_COUNTERPART,
    RunPlaces,
    collected,
    put_places,
)
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData, put_data
from trainkit.engines.megatron_lm.words import SET_BY as MEGATRON_SET_BY, MegatronWords
from trainkit.engines.options import OptionTable, Value, check_engine_args
from trainkit.jobs.schema import Job
from trainkit.plan.layout import padded_vocab_size

VANILLA = "vanilla_gpt_pretrain_config"
RECIPE = "recipe"
MIXED = "mixed_precision"
PER_SPLIT = tuple(f"{split}-data-path" for split in SPLITS)
# where a field is looked for that has an option's name
SECTIONS = (
    "model",
    "validation",
    "train",
    "optimizer",
    "scheduler",
    "dataset",
    "checkpoint",
    "logger",
    "dist",
    "ddp",
    "tokenizer",
)
# options that several fields say, or one of another name; none: others say the same
FIELDS: Mapping[str, tuple[str, ...]] = {
    "seed": ("rng.seed", "dataset.random_seed"),
    "seq-length": ("dataset.seq_length", "model.seq_length"),
    "norm-epsilon": ("model.layernorm_epsilon",),
    "weight-decay": (
        "optimizer.weight_decay",
        "scheduler.start_weight_decay",
        "scheduler.end_weight_decay",
    ),
    "use-distributed-optimizer": (
        "optimizer.use_distributed_optimizer",
        "ddp.use_distributed_optimizer",
    ),
    "rotary-seq-len-interpolation-factor": ("model.seq_len_interpolation_factor",),
    "make-vocab-size-divisible-by": ("model.make_vocab_size_divisible_by",),
    "vocab-size": ("tokenizer.vocab_size",),
    "override-opt_param-scheduler": ("scheduler.override_opt_param_scheduler",),
    "data-cache-path": ("dataset.path_to_cache",),
    "num-layers-per-virtual-pipeline-stage": ("model.virtual_pipeline_model_parallel_size",),
    "max-position-embeddings": (),
    "group-query-attention": (),
    "mock-data": (),
    # its layers are Transformer Engine's, its checkpoints torch_dist
    "transformer-impl": (),
    "ckpt-format": (),
    # of fp16 its recipe's own
    "initial-loss-scale": (),
    "min-loss-scale": (),
    "loss-scale-window": (),
    "hysteresis": (),
}
# options without a value, and what they change
SWITCHES: Mapping[str, Mapping[str, Value]] = {
    "swiglu": {"model.gated_linear_unit": True, "model.activation_func": "silu"},
    "squared-relu": {"model.activation_func": "squared_relu"},
    "disable-bias-linear": {"model.add_bias_linear": False},
    "untie-embeddings-and-output-weights": {"model.share_embeddings_and_output_weights": False},
    "use-rope-scaling": {"model.rope_scaling": True},
    "no-bias-gelu-fusion": {"model.bias_activation_fusion": False},
    "no-bias-swiglu-fusion": {"model.bias_activation_fusion": False},
    "no-bias-dropout-fusion": {"model.bias_dropout_fusion": False},
    "no-rope-fusion": {"model.apply_rope_fusion": False},
    "no-masked-softmax-fusion": {"model.masked_softmax_fusion": False},
    "no-persist-layer-norm": {"model.persist_layer_norm": False},
    "no-gradient-accumulation-fusion": {"model.gradient_accumulation_fusion": False},
    "deterministic-mode": {
        "model.deterministic_mode": True,
        "model.cross_entropy_loss_fusion": False,
    },
    "bf16": {MIXED: "bf16_mixed"},
    "fp16": {MIXED: "fp16_mixed"},
}
# what Megatron-LM's defaults say, which a recipe may have otherwise: fusions change how GELU is
# computed (core/fusions/fused_bias_gelu.py)
ALWAYS: Mapping[str, Value] = {
    "model.gated_linear_unit": False,
    "model.activation_func": "gelu",
    "model.add_bias_linear": True,
    "model.add_qkv_bias": False,
    "model.qk_layernorm": False,
    "model.normalization": "LayerNorm",
    "model.position_embedding_type": "learned_absolute",
    "model.share_embeddings_and_output_weights": True,
    "model.num_moe_experts": None,
    "model.mtp_num_layers": None,
    "model.multi_latent_attention": False,
    "model.pipeline_model_parallel_layout": None,
    "model.rope_scaling": False,
    "model.seq_len_interpolation_factor": None,
    "model.bias_activation_fusion": True,
    "model.recompute_granularity": None,
    "model.recompute_method": None,
    "model.recompute_num_layers": None,
    "model.sequence_parallel": False,
    "model.context_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None,
    "optimizer.optimizer": "adam",
    "optimizer.use_distributed_optimizer": False,
    "ddp.use_distributed_optimizer": False,
    "scheduler.lr_decay_iters": None,
    "scheduler.lr_warmup_iters": 0,
    "scheduler.lr_warmup_fraction": None,
    "scheduler.lr_warmup_init": 0.0,
    "checkpoint.async_save": False,
    "checkpoint.load": None,
    "tokenizer.use_tokenizer_vocab_size": True,
}
# what needs the distributed optimizer (megatron/training/arguments.py, validate_args), as does
# comm_overlap, which turns it on by itself (training/comm_overlap.py)
GATHERS = ("ddp.overlap_param_gather", "optimizer.overlap_param_gather")
# that Megatron-LM has by itself; a recipe of a published model says which it has
FUSIONS: Mapping[str, Value] = {
    "model.bias_dropout_fusion": True,
    "model.apply_rope_fusion": True,
}
# without a recipe of mixed precision; numbers are no override's, and its stages ask for a type
DTYPES = ("model.params_dtype", "model.pipeline_dtype", "optimizer.params_dtype")
FP32: Mapping[str, Value] = {
    MIXED: None,
    "optimizer.bf16": False,
    "optimizer.fp16": False,
    "model.bf16": False,
    "model.fp16": False,
    "model.enable_autocast": False,
    **{name: {"_target_": "torch.float32", "_call_": False} for name in DTYPES},
}
SCALES = "its recipe of fp16 has its own"
NEWEST = "it keeps the newest only, keep_last"
NO_COUNTERPART: Mapping[str, str] = {
    **MEGATRON_NO_COUNTERPART,
    "checkpoint.keep_best": NEWEST,
    "checkpoint.keep_every": NEWEST,
    "training.max_skipped_in_a_row": "it counts skipped steps and goes on",
    "training.initial_loss_scale": SCALES,
    "training.min_loss_scale": SCALES,
    "training.loss_scale_window": SCALES,
    "training.hysteresis": SCALES,
    "training.loss_scale": SCALES,
}
STAGES = "parallelism.pipeline_model_parallel_size"
SUPERVISED = "`invoke train`, whose agents watch ranks and start them again"
# more fields that trainkit sets, or that would undo what a job says
OTHERS: Mapping[str, str] = {
    "dataset.blend": "dataset",
    "dataset.blend_per_split": "dataset",
    "dataset.mock": "dataset = 'mock'",
    "dataset.sequence_length": "model.seq_length",
    "model.num_moe_experts": "model.moe.num_experts",
    "model.pipeline_model_parallel_layout": STAGES,
    "model.num_layers_in_first_pipeline_stage": STAGES,
    "model.num_layers_in_last_pipeline_stage": STAGES,
    "model.account_for_embedding_in_pipeline_split": STAGES,
    "model.account_for_loss_in_pipeline_split": STAGES,
    "model.enable_autocast": "training.precision",
    **dict.fromkeys(DTYPES, "training.precision"),
    "model.vocab_size": "model.vocab_size",
    "tokenizer.use_tokenizer_vocab_size": "model.vocab_size",
    "checkpoint.most_recent_k": "checkpoint.keep_last",
    "checkpoint.ckpt_step": "`invoke resume`",
    "checkpoint.finetune": "init_from",
    "checkpoint.pretrained_checkpoint": "init_from",
    "checkpoint.load_optim": "`invoke resume`, which goes on with all",
    "checkpoint.load_rng": "`invoke resume`, which goes on with all",
    "checkpoint.save_optim": "`invoke resume`, which goes on with all",
    "checkpoint.save_rng": "`invoke resume`, which goes on with all",
    "checkpoint.non_persistent_ckpt_type": "training.save_interval",
    "scheduler.max_steps": "training.lr_decay_iters",
    "scheduler.lr_decay_steps": "training.lr_decay_iters",
    "scheduler.lr_warmup_steps": "training.lr_warmup_iters",
    "scheduler.wsd_decay_steps": "training.lr_wsd_decay_iters",
    "train.rampup_batch_size": "training.rampup_batch_size",
    "train.step_batch_size_schedule": "training.rampup_batch_size",
    "train.decrease_batch_size_if_needed": "training.global_batch_size",
    "train.skip_train": "training.train_iters",
    "validation.skip_train": "training.train_iters",
    "train.exit_signal": "`invoke cancel --save`",
    "train.exit_signal_handler": "`invoke cancel --save`",
    "logger.skip_train_metrics_log": "training.log_interval",
    "ddp.use_megatron_fsdp": "parallelism.zero_stage",
    "ddp.data_parallel_sharding_strategy": "parallelism.zero_stage",
    "dist.use_megatron_fsdp": "parallelism.zero_stage",
    "dist.use_torch_fsdp2": "parallelism.zero_stage",
    "train.num_epochs": "training.train_iters",
    "train.eval_iters": "training.eval_iters",
    "train.eval_interval": "training.eval_interval",
    "optimizer.bf16": "training.precision",
    "optimizer.fp16": "training.precision",
    "model.bf16": "training.precision",
    "model.fp16": "training.precision",
    **dict.fromkeys(("inprocess_restart", "inprocess_restart.enabled"), SUPERVISED),
    **dict.fromkeys(("ft", "ft.enable_ft_package"), SUPERVISED),
}
# whose folders of Hugging Face's form it reads, of those that it trains here
CAUSAL = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Places(RunPlaces):
    """The same.

    Args:
        step: of the checkpoint that it goes on from; None: from the beginning.
        weights: a folder of Hugging Face's form that a new run begins with.
    """

    step: int | None = None
    weights: Path | None = None


def set_by(table: OptionTable) -> Mapping[str, str]:
    """Fields that trainkit sets from a job, and the keys of jobs.toml that say them."""
    found = dict(OTHERS)
    for option, key in MEGATRON_SET_BY.items():
        names = FIELDS.get(option) or tuple(SWITCHES.get(option, ())) or field_of(option, table)
        found |= {each: key for each in names if each != MIXED}
    return found


def field_of(option: str, table: OptionTable) -> tuple[str, ...]:
    """The field that has an option's name; none where there is no such."""
    name = option.replace("-", "_")
    fields = (f"{section}.{name}" for section in SECTIONS)
    return tuple(each for each in fields if each in table.options)[:1]


def word_problems(job: Job, table: OptionTable, megatron: OptionTable) -> list[Problem]:
    """What of a job a version cannot do, before anything of its data is there.

    Args:
        job: the job.
        table: the fields of the version.
        megatron: the options of the Megatron-LM below it.
    """
    return [
        *check_engine_args(job, table, set_by(table)),
        *_own_problems(job, table),
        *_collected(job, megatron).problems,
    ]


def _own_problems(job: Job, table: OptionTable) -> Iterator[Problem]:
    precision = job.training.precision
    mixed = str(job.engine_args.get(MIXED, precision))
    if precision not in mixed:
        yield Problem(
            f"engine_args.{MIXED} = '{mixed}' with training.precision = '{precision}'",
            hint=f"name a recipe of {precision}",
        )
    if job.model.architecture.learned_positions and job.model.positions != job.model.seq_length:
        yield Problem(
            f"model.max_position_embeddings {job.model.positions}: Megatron-Bridge learns as many"
            f" positions as a sample has, {job.model.seq_length}",
            hint="leave max_position_embeddings out",
        )
    if job.init_from:
        yield from _initial_problems(job)
    own = set_by(table)
    for word in job.args:
        name = word.lstrip("+~").partition("=")[0]
        if word.startswith("-"):
            yield Problem(
                f"args has {word}: options of run_recipe.py are trainkit's",
                hint="args are fields, KEY=VALUE",
            )
        elif name in own:
            yield Problem(f"args has {word}, which trainkit sets itself", hint=f"use {own[name]}")


def _initial_problems(job: Job) -> Iterator[Problem]:
    """models/conversion/auto_bridge.py takes names that end with ForCausalLM, and
    model_bridge.py no other number of rows than there are."""
    model = job.model
    if model.family not in CAUSAL:
        yield Problem(
            f"init_from: Megatron-Bridge reads no folder of family '{model.family}'",
            hint=f"it reads those of {', '.join(CAUSAL)}; engine = 'native' has this one",
        )
    tokenizer = job.dataset.tokenizer
    rows = model.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    divisor = model.make_vocab_size_divisible_by
    tensor = job.parallelism.tensor_model_parallel_size
    if rows and (padded := padded_vocab_size(rows, divisor, tensor)) != rows:
        yield Problem(
            f"init_from: Megatron-Bridge pads a vocabulary of {rows} to {padded}, and fills no"
            f" padding (models.{model.name}.make_vocab_size_divisible_by {divisor} x TP {tensor})",
            hint="set make_vocab_size_divisible_by = 1, and a degree that divides the vocabulary",
        )


def _collected(job: Job, megatron: OptionTable) -> MegatronWords:
    """What Megatron-LM would be given for the job, without what only Bridge knows."""
    own: dict[str, object] = {"engine_args": {}, "args": (), "init_from": None}
    words = MegatronWords(megatron, job.model_copy(update=own), defaults=False)
    return collected(words, "Megatron-Bridge", NO_COUNTERPART)


def bridge_words(
    job: Job, table: OptionTable, megatron: OptionTable, data: MegatronData, places: Places
) -> tuple[str, ...]:
    """The words after run_recipe.py.

    Args:
        job: the job.
        table, megatron: as of `word_problems`.
        data: what it reads.
        places: where the attempt reads and writes.

    Raises ConfigError: everything that the version cannot do, or the job says wrong.
    """
    raise_problems(word_problems(job, table, megatron))
    said = _collected(job, megatron)
    put_places(said, said.job, places)
    put_data(said, said.job, data)
    values = _fields(job, said, table)
    values |= {"checkpoint.ckpt_step": places.step} if places.step is not None else {}
    values |= {"checkpoint.pretrained_checkpoint": str(places.weights)} if places.weights else {}
    if not (data.mock or data.split):
        values["dataset.blend_per_split"] = _blends(said)
    values |= {key: value for key, value in job.engine_args.items() if key != RECIPE}
    return (
        "--recipe",
        str(job.engine_args.get(RECIPE, VANILLA)),
        "--mode",
        "pretrain",
        "--dataset",
        "mock" if data.mock else "megatron-indexed",
        *(Override(name, value).word() for name, value in values.items()),
        *job.args,
    )


def _fields(job: Job, said: MegatronWords, table: OptionTable) -> dict[str, Value]:
    """All that the job says, but for data and places."""
    named = RECIPE in job.engine_args
    values = {**ALWAYS, **({} if named else FUSIONS)}
    values |= FP32 if job.training.precision == "fp32" else {}
    # of swiglu alone; and a recipe of bf16 may compute in 8 bits what it has chosen
    spared = {"no-bias-swiglu-fusion"} if not job.model.mlp.gated else set()
    spared |= {"bf16"} if named else set()
    for option, value in said.options:
        if option.name not in spared:
            values |= _values(option.name, value, table)
    if chunks := job.parallelism.virtual_pipeline_model_parallel_size:
        values["model.virtual_pipeline_model_parallel_size"] = chunks
    if not values["ddp.use_distributed_optimizer"]:
        values |= {"comm_overlap": None, **dict.fromkeys(GATHERS, False)}
    return values | {
        "model.kv_channels": job.model.head_size,
        "model.ffn_hidden_size": job.model.ffn_width,
        "model.num_query_groups": job.model.query_groups,
        "checkpoint.most_recent_k": job.checkpoint.keep_last,
    }


def _values(option: str, value: Value, table: OptionTable) -> Mapping[str, Value]:
    """Fields that say an option. Raises ConfigError where the version has none."""
    if option in SWITCHES:
        return SWITCHES[option]
    if option in PER_SPLIT:
        return {}
    names = FIELDS.get(option, field_of(option, table))
    if not names and option not in FIELDS:
        raise ConfigError(f"Megatron-Bridge {table.version} has no field for --{option}")
    return dict.fromkeys(names, value)


def _blends(said: MegatronWords) -> list[Value]:
    """dataset.blend_per_split: of each split its prefixes and their weights, or nothing
    (core/datasets/utils.py, get_blend_from_list)."""
    given = {option.name: value for option, value in said.options}
    return [_blend(given.get(name)) for name in PER_SPLIT]


def _blend(words: Value) -> list[Value] | None:
    if not isinstance(words, list):
        return None
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return [words, None]
    return [words[1::2], weights]
