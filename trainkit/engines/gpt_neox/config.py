"""A job in GPT-NeoX's words: the content of its merged YAML file.

Names, defaults and meanings: EleutherAI/gpt-neox at ea7aefd, megatron/neox_arguments/neox_args.py
and deepspeed_args.py; the blocks fp16, bf16 and zero_optimization are DeepSpeed's ("DeepSpeed
Configuration JSON"). Names have underscores; the loader takes dashes for the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.indexed.paths import DataFolder
from trainkit.engines.pair_weights import pair_weights
from trainkit.jobs.schema import Job
from trainkit.jobs.training import Training, native_float8
from trainkit.runs.folder import RunFolder

if TYPE_CHECKING:  # they import numpy, which planning does without
    from trainkit.data.order.native import SplitName
    from trainkit.data.order.resolve_pairs import SplitPair

Config = dict[str, object]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
# DeepSpeed's own size of both buckets ("ZeRO Optimizations for FP16 Training")
BUCKET_ELEMENTS = 500_000_000
# what a key of our models is in GPT-NeoX's words
INIT_METHODS = {
    "normal": "normal",
    "scaled": "scaled_normal",
    "small_init": "small_init",
    "wang_init": "wang_init",
}
# GPT-NeoX's name of each value that the job itself says, and its key in jobs.toml: engine_args
# may not say it otherwise, and an imported file's value goes there
SAID_BY_THE_JOB: dict[str, str] = {
    "model_parallel_size": "parallelism.tensor_model_parallel_size",
    "sequence_parallel": "parallelism.sequence_parallel",
    "global_num_gpus": "nodes",
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_kv_heads": "model.num_query_groups",
    "seq_length": "model.seq_length",
    "max_position_embeddings": "model.max_position_embeddings",
    "make_vocab_size_divisible_by": "model.make_vocab_size_divisible_by",
    "norm": "model.family",
    "layernorm_epsilon": "model.layernorm_epsilon",
    "rms_norm_epsilon": "model.layernorm_epsilon",
    "pos_emb": "model.family",
    "rotary_pct": "model.rotary_percent",
    "rotary_emb_base": "model.rotary_base",
    "no_weight_tying": "model.untie_embeddings_and_output_weights",
    "activation": "model.family",
    "bias_gelu_fusion": "model.gelu",
    "gpt_j_residual": "model.gpt_j_residual",
    "gpt_j_tied": "model.gpt_j_tied",
    "intermediate_size": "model.ffn_hidden_size",
    "use_bias_in_norms": "model.family",
    "use_bias_in_attn_linear": "model.family",
    "use_bias_in_mlp": "model.family",
    "init_method": "model.init_method",
    "output_layer_init_method": "model.output_layer_init_method",
    "init_method_std": "model.init_method_std",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "train_iters": "training.train_iters",
    "lr_decay_style": "training.lr_decay_style",
    "lr_decay_iters": "training.lr_decay_iters",
    "min_lr": "training.min_lr",
    "warmup": "training.lr_warmup_fraction",
    "weight_decay": "training.weight_decay",
    "gradient_clipping": "training.clip_grad",
    "clip_grad": "training.clip_grad",
    "precision": "training.precision",
    "checkpoint_activations": "training.recompute_granularity",
    "eod_mask_loss": "training.eod_mask_loss",
    "seed": "training.seed",
    "log_interval": "training.log_interval",
    "eval_interval": "training.eval_interval",
    "eval_iters": "training.eval_iters",
    "checkpoint_factor": "training.save_interval",
    "keep_last_n_checkpoints": "checkpoint.keep_last",
    "data_path": "dataset",
    "train_data_paths": "dataset",
    "valid_data_paths": "dataset",
    "test_data_paths": "dataset",
    "train_data_weights": "dataset",
    "valid_data_weights": "dataset",
    "test_data_weights": "dataset",
    "split": "dataset.split",
    "tokenizer_type": "dataset.tokenizer",
    "vocab_file": "dataset.tokenizer",
    "merge_file": "dataset.tokenizer",
    "use_wandb": "wandb",
    "wandb_project": "wandb.project",
    "wandb_team": "wandb.entity",
    "wandb_group": "wandb.group",
    "profile": "profile",
    "profile_step_start": "profile.start",
    "profile_step_stop": "profile.stop",
    "distributed_backend": "cluster.device",
    "hostfile": "cluster.hostfile",
    "lr": "training.lr",
    "zero_stage": "parallelism.zero_stage",
    "save": "nothing (checkpoints lie in the run's folder)",
    "tensorboard_dir": "nothing (it lies in the run's folder)",
    "deepspeed_slurm": "cluster.launcher",
    "deepspeed_mpi": "cluster.launcher",
    "launcher": "cluster.launcher",
    "num_nodes": "nodes",
    "num_gpus": "cluster.gpus_per_node",
    "include": "cluster.hostfile",
    "exclude": "cluster.hostfile",
    "master_addr": "cluster.interface",
    "user_script": "nothing (it is train.py)",
    "config_files": "nothing (it is the run's own file)",
}
# the same inside of its tables; the rest of a table is open to engine_args
SAID_IN_TABLES: dict[str, str] = {
    "optimizer.params.lr": "training.lr",
    "optimizer.params.betas": "training.adam_beta1",
    "optimizer.params.eps": "training.adam_eps",
    "zero_optimization.stage": "parallelism.zero_stage",
    "fp16.enabled": "training.precision",
    "fp16.loss_scale": "training.loss_scale",
    "fp16.loss_scale_window": "training.loss_scale_window",
    "fp16.initial_scale_power": "training.initial_loss_scale",
    "fp16.hysteresis": "training.hysteresis",
    "fp16.min_loss_scale": "training.min_loss_scale",
    "bf16.enabled": "training.precision",
}


@dataclass(frozen=True)
class NeoxData:
    """Where GPT-NeoX finds its samples.

    Args:
        path: the one pair that `split` cuts, without .bin and .idx; "": each split has its own.
        split: weights of train, valid and test.
        parts: of each split with pairs of its own, the prefixes and their weights.
    """

    path: str
    split: str
    parts: Mapping[SplitName, Sequence[tuple[str, float]]]

    def words(self) -> Config:
        """Its keys."""
        found: Config = {"data_impl": "mmap"}
        if self.path:
            return found | {"data_path": self.path, "split": self.split}
        for name in SPLITS:
            found[f"{name}_data_paths"] = [path for path, _ in self.parts[name]]
            found[f"{name}_data_weights"] = [weight for _, weight in self.parts[name]]
        return found


def neox_data(job: Job) -> NeoxData:
    """The pairs that the job's samples come from.

    Raises ConfigError: pairs that are not there (exit 6), or a dataset of several pairs that are
    to be cut, which GPT-NeoX cannot (it reads the pairs of a blend whole).
    """
    from trainkit.data.order.resolve_pairs import weighed_pairs

    pairs = {name: weighed_pairs(job, job.dataset, name, by_documents=True) for name in SPLITS}
    train = pairs["train"]
    if len(train) == 1 and all(pairs[name] == train for name in SPLITS):
        return NeoxData(str(train[0].prefix), train[0].split, {})
    for name in SPLITS:
        _refuse_cut(job, name, pairs[name])
    return NeoxData("", "", {name: _weighted(pairs[name]) for name in SPLITS})


def _refuse_cut(job: Job, name: SplitName, pairs: Sequence[SplitPair]) -> None:
    """Raise ConfigError (exit 3) for a split that GPT-NeoX cannot read."""
    name_of = f"datasets.{job.dataset.name}"
    if not pairs:
        raise ConfigError(
            f"{name_of} has nothing for the split {name}, and gpt-neox wants pairs for each of"
            " train, valid and test",
            hint="give it valid_files and test_files, or valid_blend and test_blend",
        )
    cut = [pair for pair in pairs if not _is_whole(pair.split, name)]
    if cut:
        raise ConfigError(
            f"{name_of}: gpt-neox cuts one .bin/.idx pair by `split`, and {len(pairs)} pairs of a"
            f" blend it reads whole, so that {cut[0].prefix} would be in every split",
            hint="give it valid_files and test_files, or valid_blend and test_blend; or merge them",
        )


def _is_whole(split: str, name: SplitName) -> bool:
    weights = [float(each) for each in split.split(",")]
    weights += [0.0] * (3 - len(weights))
    return weights[SPLITS.index(name)] == sum(weights)


def _weighted(pairs: Sequence[SplitPair]) -> list[tuple[str, float]]:
    """Each pair with its weight: by size where the job gives none."""
    alone = len(pairs) == 1 and pairs[0].weight is None
    weights = [1.0] if alone else pair_weights(pairs)
    return [(str(pair.prefix), weight) for pair, weight in zip(pairs, weights, strict=True)]


def tokenizer_words(job: Job) -> Config:
    """The tokenizer's keys. HFTokenizer reads a tokenizer.json, GPT2BPETokenizer vocabulary and
    merges (megatron/tokenizer/tokenizer.py)."""
    tokenizer = job.dataset.tokenizer
    if tokenizer is None:
        return {}
    if tokenizer.type == "gpt2":
        return {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": tokenizer.vocab_file,
            "merge_file": tokenizer.merge_file,
        }
    trained = DataFolder(Path(job.cluster.root or ""), job.dataset).tokenizer
    return {"tokenizer_type": "HFTokenizer", "vocab_file": tokenizer.path or str(trained)}


def neox_config(job: Job, run: RunFolder, data: NeoxData) -> Config:
    """The content of the merged YAML file.

    Args:
        job: the job, of which `problems` of the engine has nothing to say.
        run: its folder, for checkpoints and tensorboard.
        data: where its samples lie.
    """
    config = {
        **_layout_words(job),
        **_model_words(job),
        **_optimizer_words(job),
        "train_micro_batch_size_per_gpu": job.training.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "eod_mask_loss": job.training.eod_mask_loss,
        "seed": job.training.seed,
        **_schedule_words(job),
        **precision_words(job.training),
        **_recompute_words(job.training),
        **data.words(),
        **tokenizer_words(job),
        **_report_words(job),
        "save": str(run.checkpoints),
        "load": str(run.checkpoints),
        "tensorboard_dir": str(run.tensorboard),
    }
    return overlay(config, job.engine_args)


def overlay(config: Mapping[str, object], given: Mapping[str, object]) -> Config:
    """`given` over `config`, key by key also inside of tables; dashes are underscores."""
    merged = dict(config)
    for key, value in given.items():
        name = key.replace("-", "_")
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = overlay(below, value)
        else:
            merged[name] = value
    return merged


def _layout_words(job: Job) -> Config:
    p = job.parallelism
    # DeepSpeed's pipeline engine refuses ZeRO-2 and 3: 0 is the model without it
    stages = p.pipeline_model_parallel_size
    if p.zero_stage >= 2 and stages == 1:
        stages = 0
    words: Config = {
        "pipe_parallel_size": stages,
        "model_parallel_size": p.tensor_model_parallel_size,
        # else it counts the GPUs that it sees, or the slots of /job/hostfile
        "global_num_gpus": job.world_size,
        "distributed_backend": "gloo" if job.cluster.device_type == "cpu" else "nccl",
    }
    if p.sequence_parallel:
        words["sequence_parallel"] = True
    return words


def _model_words(job: Job) -> Config:
    m = job.model
    words: Config = {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "seq_length": m.seq_length,
        "max_position_embeddings": m.positions,
        "make_vocab_size_divisible_by": m.make_vocab_size_divisible_by,
        "pos_emb": "learned" if m.architecture.learned_positions else "rotary",
        "no_weight_tying": m.untied,
        "gpt_j_residual": m.parallel_residual,
        "gpt_j_tied": m.gpt_j_tied,
        "output_layer_parallelism": "column",
        # the fused kernel computes GELU's tanh form, torch's own the exact one
        "bias_gelu_fusion": m.gelu_form == "tanh",
        "init_method": INIT_METHODS[m.init_method],
        "output_layer_init_method": INIT_METHODS[m.output_layer_init_method],
        "init_method_std": m.init_method_std,
        "attention_dropout": m.attention_dropout,
        "hidden_dropout": m.hidden_dropout,
    }
    if not m.architecture.learned_positions:
        words["rotary_pct"] = m.rotary_fraction
        words["rotary_emb_base"] = int(m.theta)
    if m.query_groups != m.num_attention_heads:
        words["num_kv_heads"] = m.query_groups
    return words | _norm_and_mlp_words(job)


def _norm_and_mlp_words(job: Job) -> Config:
    m = job.model
    words: Config = {}
    if m.architecture.norm.kind == "rms-norm":
        words |= {"norm": "rmsnorm", "rms_norm_epsilon": m.layernorm_epsilon}
    else:
        words |= {"norm": "layernorm", "layernorm_epsilon": m.layernorm_epsilon}
    if m.mlp.gated:
        # it takes two thirds of intermediate_size for gate and value together
        # (megatron/model/transformer.py, ParallelMLP)
        words |= {"activation": "swiglu", "intermediate_size": 3 * m.ffn_width}
    else:
        words["activation"] = "gelu"
        if m.ffn_width != 4 * m.hidden_size:
            words["intermediate_size"] = m.ffn_width
    if not m.architecture.bias:
        words |= {
            "use_bias_in_norms": False,
            "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False,
        }
    return words


def _optimizer_words(job: Job) -> Config:
    t = job.training
    return {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": t.lr, "betas": [t.adam_beta1, t.adam_beta2], "eps": t.adam_eps},
        },
        "zero_optimization": {
            "stage": job.parallelism.zero_stage,
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "contiguous_gradients": True,
        },
        "weight_decay": t.weight_decay,
        "gradient_clipping": t.clip_grad,
    }


def _schedule_words(job: Job) -> Config:
    t = job.training
    # it evaluates at the end in any case, and divides by eval_interval
    return {
        "train_iters": t.train_iters,
        "lr_decay_style": t.lr_decay_style,
        "lr_decay_iters": t.decay_iters,
        "min_lr": t.min_lr,
        "warmup": warmup_fraction(t),
        "eval_interval": t.eval_interval or t.train_iters + 1,
        "eval_iters": t.eval_iters,
        "checkpoint_factor": t.save_interval or t.train_iters,
        "keep_last_n_checkpoints": job.checkpoint.keep_last,
        "checkpoint_scale": "linear",
        **({"extra_save_iters": [0]} if job.checkpoint.save_first else {}),
    }


def warmup_fraction(training: Training) -> float:
    """The warmup as a part of the decay, as GPT-NeoX takes it."""
    if training.lr_warmup_fraction is not None:
        return training.lr_warmup_fraction
    return training.lr_warmup_iters / training.decay_iters


def precision_words(t: Training) -> Config:
    """The number format: DeepSpeed's blocks fp16 and bf16."""
    match t.precision:
        case "fp32":
            return {"precision": "fp32"}
        case "bf16":
            # it warns that ZeRO-1 with bf16 gradients breaks (DeepSpeed issue 1835)
            return {
                "precision": "bfloat16",
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            }
        case "fp16":
            least = t.min_loss_scale
            block: Config = {
                "enabled": True,
                "loss_scale": t.loss_scale or 0,
                "loss_scale_window": t.loss_scale_window,
                "initial_scale_power": int(math.log2(t.initial_loss_scale)),
                "hysteresis": t.hysteresis,
                # DeepSpeed types it as an integer
                "min_loss_scale": int(least) if least.is_integer() else least,
            }
            return {"precision": "fp16", "fp16": block}
        case "fp8":
            raise native_float8("gpt-neox")
        case unknown:
            assert_never(unknown)


def _recompute_words(t: Training) -> Config:
    if t.recompute_granularity == "none":
        return {"checkpoint_activations": False}
    return {"checkpoint_activations": True, "checkpoint_num_layers": 1}


def _report_words(job: Job) -> Config:
    # not given, it reports to W&B wherever it finds a key
    words: Config = {
        "log_interval": job.training.log_interval,
        "use_wandb": job.wandb is not None,
    }
    if job.wandb is not None:
        words["wandb_project"] = job.wandb.project
        if job.wandb.entity is not None:
            words["wandb_team"] = job.wandb.entity
        if job.wandb.group is not None:
            words["wandb_group"] = job.wandb.group
    if job.profile is not None:
        words |= {
            "profile": True,
            "profile_step_start": job.profile.start,
            "profile_step_stop": job.profile.stop,
        }
    return words


def yaml_text(config: Mapping[str, object]) -> str:
    """The configuration as a YAML file, in JSON's form.

    Every fraction has a dot: YAML 1.1, as PyYAML reads it, takes 1e-08 for a text.
    """
    return f"{_yaml(config, '')}\n"


def _yaml(value: object, indent: str) -> str:
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = indent + "  "
        lines = [f"{inner}{_scalar(str(key))}: {_yaml(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(each, indent) for each in value) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    text = json.dumps(value)
    if isinstance(value, float) and "." not in text and "e" in text:
        return text.replace("e", ".0e")
    return text
