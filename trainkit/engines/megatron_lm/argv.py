"""The command line of Megatron-LM's pretrain_gpt.py, from a job: a pure function of it and of the
options that a version has.

Sources: megatron/training/arguments.py (core 0.12 to 0.19) and megatron/arguments.py (May 2021),
validate_args of each; gpt_builders.py; bigscience at 8b25137, experiments/gpt2.md; Azure's
04-gpt175B.sh. Options that trainkit sets itself: `SET_BY`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import assert_never

from trainkit.base.errors import Problem, raise_problems
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.job_values import counterpart_problems
from trainkit.engines.megatron_lm.data import MegatronData, put_data, put_tokenizer
from trainkit.engines.megatron_lm.experts import put_experts, put_latents
from trainkit.engines.megatron_lm.rules import sharding_obstacle
from trainkit.engines.megatron_lm.script_options import parsed
from trainkit.engines.megatron_lm.words import SET_BY, MegatronWords
from trainkit.engines.options import OptionTable, check_engine_args, release
from trainkit.jobs.schema import Job, Model, RopeScaling, Training

# keys that only have their default with Megatron-LM, and why
NO_COUNTERPART: Mapping[str, str] = {
    "training.rampup_batch_size": "it refuses it where training is counted in iterations",
    "training.z_loss": "it has none on the logits of the model",
    "training.recompute_every": (
        "it recomputes every block of a stage, or its first ones: engine_args recompute-method and"
        " recompute-num-layers say which"
    ),
    "training.on_nan": "engine native does that",
    "training.on_spike": "engine native does that",
    "training.compile": "engine native does that",
    "training.replay_interval": "engine native does that",
    "training.ema_decay": "engine native does that",
    "training.fp8_recipe": "engine native does that",
    "parallelism.pipeline_schedule": "its pipeline is 1F1B",
    "checkpoint.save_first": "engine native does that",
    "checkpoint.memory_interval": "engine native does that",
    "checkpoint.keep_best": "it deletes no checkpoint",
    "init_from": "it begins with weights of its own format only: engine_args",
    "kernels": "it chooses its kernels by options of its own: engine_args",
    "profile": "engine_args profile, profile-step-start and -end say it",
    "validation": "further validation sets are engine native's",
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.init_method": ("normal",),
    "model.output_layer_init_method": ("scaled",),
}
# words of `args` that would make a run end, begin or save elsewhere than its records say
_NEVER_RAW = ("save", "load", "train-iters", "train-samples")


@dataclass(frozen=True)
class RunPlaces:
    """Where one attempt reads and writes.

    Args:
        run: the run's folder.
        name: of the run, for reports.
        load: there is a checkpoint to go on from. Without one `--load` is left out: the engine
            would train from random weights and end with 0.
    """

    run: Path
    name: str
    load: bool = False


def megatron_argv(
    job: Job, table: OptionTable, data: MegatronData, places: RunPlaces
) -> tuple[str, ...]:
    """The words after `pretrain_gpt.py`.

    Args:
        job: the job.
        table: the options of the engine's version.
        data: what it reads.
        places: where the attempt reads and writes.

    Raises ConfigError: everything that the version cannot do, or the job says wrong.
    """
    raise_problems(argv_problems(job, table))
    words = collected(MegatronWords(table, job))
    put_data(words, job, data)
    put_places(words, job, places)
    raise_problems(words.problems)
    own = [
        word
        for name, value in job.engine_args.items()
        if (option := table.find(name)) is not None
        for word in option.words(value)
    ]
    return (*words.words, *own, *job.args)


def argv_problems(job: Job, table: OptionTable) -> list[Problem]:
    """What of a job a version cannot do, before anything of its data is there."""
    words = MegatronWords(table, job)
    words.problems += check_engine_args(job, table, SET_BY)
    _refuse_raw(words, job)
    return collected(words).problems


def collected(
    words: MegatronWords,
    engine: str = "Megatron-LM",
    without: Mapping[str, str] = NO_COUNTERPART,
) -> MegatronWords:
    """The same with all that its job says, but for data and places.

    Args:
        words: none so far.
        engine: as messages name it.
        without: keys that only have their default with it, and why.
    """
    job = words.job
    _put_model(words, job.model)
    put_latents(words, job.model)
    put_experts(words, job)
    _refuse_shapes(words, job.model)
    _put_batches(words, job)
    _put_optimizer(words, job)
    _put_precision(words, job)
    _put_recompute(words, job)
    _put_parallelism(words, job)
    _put_intervals(words, job)
    choices = {**CHOICES, "training.optimizer": tuple(OPTIMIZERS)}
    words.problems += counterpart_problems(job, engine, without, choices)
    _put_device(words, job)
    put_tokenizer(words, job)
    return words


def _refuse_raw(words: MegatronWords, job: Job) -> None:
    for word in job.args:
        name = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and name in _NEVER_RAW:
            words.refuse(f"args has {word}, which trainkit sets itself", f"use {SET_BY[name]}")


def _put_model(words: MegatronWords, model: Model) -> None:
    words.put_said("num-layers", "hidden-size", "num-attention-heads", "seq-length")
    words.put("max-position-embeddings", model.positions, "model.max_position_embeddings")
    gated = model.mlp.gated
    if gated or model.ffn_width != 4 * model.hidden_size:
        words.put("ffn-hidden-size", model.ffn_width, "model.ffn_hidden_size")
    if not model.mla and model.head_size * model.num_attention_heads != model.hidden_size:
        words.put("kv-channels", model.head_size, "model.kv_channels")
    if model.query_groups != model.num_attention_heads:
        words.put("group-query-attention", True, "model.num_query_groups")
        words.put("num-query-groups", model.query_groups, "model.num_query_groups")
    if not model.architecture.learned_positions:
        _put_rotary(words, model)
    family = f"model.family = '{model.family}': its"
    if model.architecture.norm.kind == "rms-norm":
        words.put("normalization", "RMSNorm", f"{family} normalization")
    if gated:
        words.put("swiglu", True, f"{family} SwiGLU")
    if not model.architecture.bias:
        words.put("disable-bias-linear", True, f"{family} lack of biases")
    if model.qkv_bias and not model.architecture.bias:
        words.put("add-qkv-bias", True, "model.add_qkv_bias")
    if model.mlp.module == "up" and not model.mlp.gelu:
        words.put("squared-relu", True, "model.activation")
    if model.query_key_norm == "head":
        words.put("qk-layernorm", True, "model.qk_norm")
    if model.untied:
        words.put(
            "untie-embeddings-and-output-weights",
            True,
            "model.untie_embeddings_and_output_weights",
        )
    if model.mlp.module == "up" and model.gelu_form != "tanh":
        # with the fusion, GELU is its tanh approximation (core/fusions/fused_bias_gelu.py), and
        # squared ReLU a ValueError (core/transformer/transformer_config.py)
        words.put("no-bias-gelu-fusion", True, "model.gelu = 'exact'")
    epsilon = "norm-epsilon" if words.has("norm-epsilon") else "layernorm-epsilon"
    words.put_said_unless_default(
        epsilon,
        "attention-dropout",
        "hidden-dropout",
        "make-vocab-size-divisible-by",
        "init-method-std",
    )


def _put_rotary(words: MegatronWords, model: Model) -> None:
    family = f"model.family = '{model.family}': its rotary positions"
    words.put("position-embedding-type", "rope", family)
    words.put_unless_default("rotary-percent", model.rotary_fraction, "model.rotary_percent")
    base = model.theta
    if base != int(base):
        words.refuse(f"model.rotary_base {base}: {words.version} takes whole numbers")
    words.put_unless_default("rotary-base", int(base), "model.rotary_base")
    scaling = model.rope_scaling
    if scaling is None or model.mla:
        return
    match scaling.type:
        case "linear":
            _put_linear_scaling(words, scaling)
        case "llama3":
            _put_llama3_scaling(words, scaling)
        case "yarn":
            words.refuse(
                f"model.rope_scaling.type = 'yarn': {words.version} stretches by it in other"
                " models",
                "engine = 'native' has it",
            )
        case unknown:
            assert_never(unknown)


def _put_linear_scaling(words: MegatronWords, scaling: RopeScaling) -> None:
    if scaling.factor != int(scaling.factor):
        words.refuse(
            f"model.rope_scaling.factor {scaling.factor}: {words.version} takes whole numbers"
        )
    if release(words.table.version) < (0, 19):
        # pretrain_gpt.py takes the option and gives it to no model: positions would not be
        # scaled, without a word (seen in 0.12.0 and 0.16.1)
        words.refuse(
            f"model.rope_scaling.type = 'linear': {words.version} accepts"
            " --rotary-seq-len-interpolation-factor and ignores it",
            "use Megatron-LM core 0.19 or later, or engine = 'native'",
        )
        return
    key = "rotary-seq-len-interpolation-factor"
    words.put(key, int(scaling.factor), "model.rope_scaling.factor")


def _put_llama3_scaling(words: MegatronWords, scaling: RopeScaling) -> None:
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fixed["original_max_position_embeddings"] = 8192
    for key, value in fixed.items():
        if getattr(scaling, key) != value:
            words.refuse(
                f"model.rope_scaling.{key} {getattr(scaling, key)}: in {words.version} it is"
                f" {value:g} and cannot be set"
            )
    words.put("use-rope-scaling", True, "model.rope_scaling")
    words.put_unless_default("rope-scaling-factor", scaling.factor, "model.rope_scaling.factor")


def _refuse_shapes(words: MegatronWords, model: Model) -> None:
    if model.query_key_norm == "projection" or (
        model.query_key_norm == "head" and model.architecture.norm.kind != "rms-norm"
    ):
        words.refuse(
            f"model.qk_norm = {model.query_key_norm!r}: {words.version} norms each head, and by"
            " the kind of its other norms",
            "engine = 'native' has it",
        )
    if model.mlp.gated and model.mlp.gelu:
        words.refuse(
            f"model.activation = 'geglu': {words.version} has SwiGLU alone",
            "engine = 'native' has it",
        )
    if model.parallel_residual:
        words.refuse(
            "model.gpt_j_residual: attention and MLP side by side is nothing that Megatron-LM has",
            "engine = 'gpt-neox' and 'native' have it; gpt_j_residual = false is one after the"
            " other",
        )


def _put_batches(words: MegatronWords, job: Job) -> None:
    training = job.training
    words.put_said("micro-batch-size")
    words.put("global-batch-size", job.global_batch_size, "training.global_batch_size")
    words.put_said("train-iters")
    words.put_said_unless_default("seed")
    if training.seed >= 2**32:
        words.refuse(f"training.seed {training.seed}: numpy's RandomState takes seeds below 2^32")
    for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
        if getattr(training, key):
            words.put(key.replace("_", "-"), True, f"training.{key}")


def _put_optimizer(words: MegatronWords, job: Job) -> None:
    training = job.training
    words.put_said("lr", "min-lr", "lr-decay-style", "weight-decay", "clip-grad")
    words.put_said("lr-decay-iters", "lr-warmup-fraction")
    if training.lr_warmup_fraction is None and training.lr_warmup_iters:
        words.put_said("lr-warmup-iters")
    if training.lr_warmup_init:
        words.put_said("lr-warmup-init")
    if training.lr_decay_style == "WSD":
        words.put_said("lr-wsd-decay-style", "lr-wsd-decay-iters")
    if training.optimizer in OPTIMIZERS:  # another one is refused by name
        OPTIMIZERS[training.optimizer](words, training)
    if leaves_muon_blockwise(job, words.table):
        words.put("muon-tp-mode", "duplicated", "--optimizer muon")


def leaves_muon_blockwise(job: Job, table: OptionTable) -> bool:
    """Whether a job asks for Muon (by `args`), and says nothing of a mode whose default is
    "blockwise": each tensor-parallel shard is orthogonalized alone, so that the layout changes
    what is learned. "duplicated" and "distributed" work on whole matrices.

    Source: core/optimizer/muon.py of 0.16.1, emerging_optimizers.py of 0.19.0; d98e8a64, whose
    default is "duplicated".
    """
    mode = table.find("muon-tp-mode")
    if mode is None or mode.default != "blockwise":
        return False
    raw = parsed(job.args, table).given
    said = any(table.find(name) is mode for name in (*job.engine_args, *raw))
    return not said and "muon" in "".join(raw.get("optimizer", ()))


def _put_adam(words: MegatronWords, training: Training) -> None:
    if (training.adam_beta1, training.adam_beta2) != (0.9, 0.999) or not words.defaults:
        words.put_said("adam-beta1", "adam-beta2")
    words.put_said_unless_default("adam-eps")


def _put_sgd(words: MegatronWords, training: Training) -> None:
    words.put_said("optimizer")
    words.put_said_unless_default("sgd-momentum")


OPTIMIZERS: Mapping[str, Callable[[MegatronWords, Training], None]] = {
    "adam": _put_adam,
    "sgd": _put_sgd,
}


def _put_precision(words: MegatronWords, job: Job) -> None:
    training = job.training
    if training.precision != "fp32":
        words.put(training.precision, True, f"training.precision = '{training.precision}'")
    if training.precision != "fp16":
        return
    if training.loss_scale is not None:
        words.put_said("loss-scale")
        return
    words.put_said_unless_default(
        "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"
    )


def _put_recompute(words: MegatronWords, job: Job) -> None:
    training = job.training
    what = training.recompute_granularity
    key = "training.recompute_granularity"
    if what == "none":
        return
    if words.has("recompute-granularity"):
        words.put("recompute-granularity", what, key)
        if what == "full":
            # "please specify recompute-method": every block for itself, as native's
            words.put("recompute-method", "uniform", key)
            words.put("recompute-num-layers", 1, key)
    elif what == "full":
        words.put("checkpoint-activations", True, key)
    else:
        words.refuse(
            f"{key} = 'selective': {words.version} recomputes whole blocks or nothing",
            "use 'full', or a newer version",
        )


def _put_parallelism(words: MegatronWords, job: Job) -> None:
    p = job.parallelism
    words.put_said("tensor-model-parallel-size", "pipeline-model-parallel-size")
    _put_stages(words, job)
    if p.context_parallel_size > 1:
        words.put_said("context-parallel-size", "cp-comm-type")
    if p.sequence_parallel and p.tensor_model_parallel_size > 1:
        words.put_said("sequence-parallel")
    if p.zero_stage > 1:
        words.refuse(
            f"parallelism.zero_stage {p.zero_stage}: Megatron-LM's distributed optimizer is stage"
            " 1",
            "set parallelism.zero_stage = 1",
        )
    elif p.zero_stage == 1:
        _put_distributed_optimizer(words, job)
    if p.data_parallel_replicate_size > 1:
        words.put_said("num-distributed-optimizer-instances")


def _put_distributed_optimizer(words: MegatronWords, job: Job) -> None:
    """Left out where there is nothing to share and it cannot be used; with more to share the plan
    objects."""
    if words.has("use-distributed-optimizer"):
        if not sharding_obstacle(job):
            words.put("use-distributed-optimizer", True, "parallelism.zero_stage")
    elif job.data_parallel_size > 1:
        words.refuse(
            f"parallelism.zero_stage 1: {words.version} has no distributed optimizer",
            "set parallelism.zero_stage = 0, or use a newer version",
        )


def _put_stages(words: MegatronWords, job: Job) -> None:
    stages = job.parallelism.pipeline_model_parallel_size
    chunks = job.parallelism.virtual_pipeline_model_parallel_size
    layers = job.model.num_layers
    if layers % stages:
        words.refuse(
            f"model.num_layers {layers} on parallelism.pipeline_model_parallel_size {stages}:"
            ' "Number of layers should be divisible by the pipeline-model-parallel size"'
            " (Megatron-LM)",
            f"stages that divide {layers}: "
            + ", ".join(str(each) for each in range(1, layers + 1) if layers % each == 0),
        )
        return
    if chunks is None:
        return
    key = "parallelism.virtual_pipeline_model_parallel_size"
    if layers % (stages * chunks):
        words.refuse(f"{key} {chunks}: {layers} layers on {stages} stages do not divide by it")
        return
    if words.table.version == "2021" and stages <= 2:
        words.refuse(f"{key} {chunks}: {words.version} interleaves three stages or more")
    words.put("num-layers-per-virtual-pipeline-stage", layers // (stages * chunks), key)


def _put_intervals(words: MegatronWords, job: Job) -> None:
    """Where a job has none, evaluation and saving happen at the end only."""
    training = job.training
    words.put(
        "log-interval", min(training.log_interval, training.train_iters), "training.log_interval"
    )
    evaluations = training.eval_interval or training.train_iters + 1
    words.put("eval-interval", evaluations, "training.eval_interval")
    words.put_said("eval-iters")
    saves = training.save_interval or training.train_iters
    words.put("save-interval", saves, "training.save_interval")
    if job.checkpoint.save_async:
        words.put_said("async-save")


def _put_device(words: MegatronWords, job: Job) -> None:
    if job.training.deterministic and job.cluster.device_type == "cuda":
        words.put_said("deterministic-mode")
    if words.table.version == "2021":
        # asked for by name in every published command of its time; there is no other on GPUs
        backend = "gloo" if job.cluster.device_type == "cpu" else "nccl"
        words.put("distributed-backend", backend, "cluster.device")
    elif job.cluster.device_type == "cpu":
        words.put("distributed-backend", "gloo", "cluster.device")
    if job.cluster.device_type != "cpu":
        return
    # kernels of CUDA, apex and Transformer Engine, which a CPU has none of
    words.put_where_known("transformer-impl", "local")
    for kernel in (
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
        "no-persist-layer-norm",
        "no-bias-dropout-fusion",
        "no-rope-fusion",
        "no-bias-swiglu-fusion",
    ):
        words.put_where_known(kernel, True)
    # readable by every version of torch; torch_dist of 0.12 fails on 2.13
    words.put_where_known("ckpt-format", "torch")


def put_places(words: MegatronWords, job: Job, places: RunPlaces) -> None:
    """Where the attempt reads and writes."""
    checkpoints = str(places.run / "checkpoints")
    words.put("save", checkpoints, "the run's folder")
    if places.load:
        words.put("load", checkpoints, "the run's folder")
        # The job is the truth: what `resume` may change of the schedule is changed, where the
        # engine would compare it with the checkpoint and stop.
        override = "override-opt_param-scheduler"
        if not words.has(override):  # its name in 2021
            override = "override-lr-scheduler"
        words.put(override, True, "resume")
    words.put("tensorboard-dir", str(places.run / "tensorboard"), "the run's folder")
    words.put_where_known("exit-signal-handler", True)
    if job.wandb is not None:
        words.put("wandb-project", job.wandb.project, "wandb.project")
        words.put("wandb-exp-name", places.name, "wandb.project")
        words.put("wandb-save-dir", str(places.run / "wandb"), "wandb.project")
        if job.wandb.entity is not None:
            words.put("wandb-entity", job.wandb.entity, "wandb.entity")
