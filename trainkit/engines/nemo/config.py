"""A job in NeMo's words: the configuration that the launcher writes as <name>_hydra.yaml, by
dotted keys.

Sources: conf/training/gpt3/{126m,5b,20b,40b,175b}.yaml of NeMo-Framework-Launcher at 0d03943e
(22.09) and at tag 24.12; NeMo 1.12 and 2.1, examples/nlp/language_modeling/conf/
megatron_gpt_config.yaml and megatron_gpt_model.py. Keys that trainkit sets itself: `SET_BY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.gpt_neox.config import yaml_text
from trainkit.engines.hydra_words import no_interpolation
from trainkit.engines.megatron_lm.data import MegatronData
from trainkit.engines.nemo.data import PREFIX, data_options
from trainkit.engines.nemo.generations import NemoGeneration
from trainkit.engines.nemo_values import LLAMA_BLOCKS
from trainkit.engines.options import OptionTable
from trainkit.jobs.schema import Job, Model
from trainkit.jobs.table import EngineValue

Config = dict[str, object]
FILENAME = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
PRECISIONS: dict[str, object] = {"bf16": "bf16", "fp16": 16, "fp32": 32}
CONSTANT = "model.optim.sched.constant_steps"
# NeMo's name of each value that the job itself says, and its key in jobs.toml
SET_BY: Mapping[str, str] = {
    "run.name": "the job's name",
    "run.results_dir": "cluster.root",
    "run.time_limit": "slurm.time",
    "trainer.num_nodes": "nodes",
    "trainer.devices": "cluster.gpus_per_node",
    "trainer.precision": "training.precision",
    "trainer.max_steps": "training.train_iters",
    "trainer.log_every_n_steps": "training.log_interval",
    "trainer.val_check_interval": "training.eval_interval",
    "trainer.limit_val_batches": "training.eval_iters",
    "trainer.limit_test_batches": "training.eval_iters",
    "trainer.accumulate_grad_batches": "training.micro_batch_size",
    "trainer.gradient_clip_val": "training.clip_grad",
    "trainer.enable_progress_bar": "nothing: it is what says how far training is",
    "exp_manager.explicit_log_dir": "cluster.root",
    "exp_manager.exp_dir": "cluster.root",
    "exp_manager.checkpoint_callback_params.dirpath": "cluster.root",
    "exp_manager.checkpoint_callback_params.save_top_k": "checkpoint.keep_last",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "parallelism",
    "exp_manager.checkpoint_callback_params.async_save": "checkpoint.save_async",
    "exp_manager.resume_from_checkpoint": "invoke resume",
    "exp_manager.create_wandb_logger": "wandb.project",
    "exp_manager.wandb_logger_kwargs.project": "wandb.project",
    "exp_manager.wandb_logger_kwargs.name": "wandb.project",
    "model.micro_batch_size": "training.micro_batch_size",
    "model.global_batch_size": "training.global_batch_size",
    "model.tensor_model_parallel_size": "parallelism.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size": "parallelism.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size": (
        "parallelism.virtual_pipeline_model_parallel_size"
    ),
    "model.sequence_parallel": "parallelism.sequence_parallel",
    "model.resume_from_checkpoint": "invoke resume",
    "model.encoder_seq_length": "model.seq_length",
    "model.max_position_embeddings": "model.max_position_embeddings",
    "model.num_layers": "model.num_layers",
    "model.hidden_size": "model.hidden_size",
    "model.ffn_hidden_size": "model.ffn_hidden_size",
    "model.num_attention_heads": "model.num_attention_heads",
    "model.num_query_groups": "model.num_query_groups",
    "model.kv_channels": "model.kv_channels",
    "model.init_method_std": "model.init_method_std",
    "model.hidden_dropout": "model.hidden_dropout",
    "model.attention_dropout": "model.attention_dropout",
    "model.layernorm_epsilon": "model.layernorm_epsilon",
    "model.make_vocab_size_divisible_by": "model.make_vocab_size_divisible_by",
    "model.share_embeddings_and_output_weights": "model.untie_embeddings_and_output_weights",
    "model.activations_checkpoint_granularity": "training.recompute_granularity",
    "model.native_amp_init_scale": "training.initial_loss_scale",
    "model.native_amp_growth_interval": "training.loss_scale_window",
    "model.hysteresis": "training.hysteresis",
    "model.seed": "training.seed",
    "model.optim.lr": "training.lr",
    "model.optim.weight_decay": "training.weight_decay",
    "model.optim.betas": "training.adam_beta1 and adam_beta2",
    "model.optim.sched.name": "training.lr_decay_style",
    "model.optim.sched.warmup_steps": "training.lr_warmup_iters",
    "model.optim.sched.min_lr": "training.min_lr",
    "model.data.data_impl": "dataset",
    "model.data.splits_string": "datasets.X.split",
    "model.data.seq_length": "model.seq_length",
    "model.data.reset_position_ids": "training.reset_position_ids",
    "model.data.reset_attention_mask": "training.reset_attention_mask",
    "model.data.eod_mask_loss": "training.eod_mask_loss",
    "model.tokenizer.library": "tokenizers.X.type",
    "model.tokenizer.type": "tokenizers.X.type",
    "model.tokenizer.vocab_file": "tokenizers.X.vocab_file",
    "model.tokenizer.merge_file": "tokenizers.X.merge_file",
}


@dataclass(frozen=True)
class NemoPlaces:
    """Where one attempt reads and writes.

    Args:
        run: the run's folder.
        name: of the run, for reports.
        resume: the checkpoint to go on from where it is not what NeMo would find by itself.
        index: the folder of sample indexes; None: beside the data.
    """

    run: Path
    name: str
    resume: str | None = None
    index: Path | None = None


def results_folder(run: Path) -> Path:
    """exp_manager's folder: the launcher's run.results_dir/results."""
    return run / "results"


def nemo_config(
    job: Job, generation: NemoGeneration, data: MegatronData, places: NemoPlaces
) -> Config:
    """The configuration of one attempt, by dotted keys in the launcher's order.

    Args:
        job: the job, that `limits` has nothing against.
        generation: which launcher's.
        data: what it reads.
        places: where the attempt reads and writes.

    Raises ConfigError: engine_args weigh files that the dataset has not.
    """
    parts: dict[str, Config] = {
        "run": {
            "name": job.name,
            "results_dir": str(places.run),
            "time_limit": job.sbatch_options.get("time"),
            "dependency": job.sbatch_options.get("dependency"),
        },
        "trainer": _trainer(job, generation),
        "exp_manager": _exp_manager(job, generation, places),
        "model": {**_model(job, generation, places), **_tokenizer(job), **_precision(job)},
        "model.optim": _optim(job, generation),
        "model.data": _data(job, data, places),
    }
    return {
        **{f"{part}.{key}": value for part, keys in parts.items() for key, value in keys.items()},
        **{
            key: value
            for key, value in job.engine_args.items()
            if not key.startswith(("+", "numa_mapping.")) and key != PREFIX
        },
    }


def with_plain_arguments(job: Job, table: OptionTable) -> Job:
    """The job with engine_args by dotted keys: `--set engine_args.model.optim.x=1` makes tables of
    them."""
    found: dict[str, EngineValue] = {}
    for key, value in job.engine_args.items():
        found |= _plain(key, value, table)
    return job.model_copy(update={"engine_args": found})


def _plain(key: str, value: EngineValue, table: OptionTable) -> dict[str, EngineValue]:
    if not isinstance(value, Mapping) or not value or key in table:
        return {key: value}
    found: dict[str, EngineValue] = {}
    for name, each in value.items():
        found |= _plain(f"{key}.{name}", cast(EngineValue, each), table)
    return found


def added_words(job: Job) -> dict[str, object]:
    """engine_args of keys that no configuration has, which hydra wants a "+" before."""
    return {
        key.removeprefix("+"): value for key, value in job.engine_args.items() if key[:1] == "+"
    }


def config_text(config: Config) -> str:
    """The configuration as a YAML file, nested. `${` in a text is a text."""
    tree: dict[str, object] = {}
    for key, value in config.items():
        *path, last = key.split(".")
        place = tree
        for name in path:
            inner = place.setdefault(name, {})
            assert isinstance(inner, dict)
            place = inner
        place[last] = _literal(value)
    return yaml_text(tree)


def _literal(value: object) -> object:
    if isinstance(value, str):
        return no_interpolation(value)
    if isinstance(value, (list, tuple)):
        return [_literal(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _literal(each) for key, each in value.items()}
    return value


def _trainer(job: Job, generation: NemoGeneration) -> Config:
    training = job.training
    return {
        "num_nodes": job.nodes,
        "devices": job.ranks_per_node,
        "accelerator": "gpu",
        "precision": PRECISIONS[training.precision],
        "logger": False,
        "enable_checkpointing": False,
        generation.sampler: False,
        "max_epochs": None,
        "max_steps": training.train_iters,
        "max_time": None,
        "log_every_n_steps": training.log_interval,
        # a validation at the end at least: a checkpoint follows each
        "val_check_interval": training.eval_interval or training.train_iters,
        "limit_val_batches": training.eval_iters,
        "limit_test_batches": training.eval_iters,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": training.clip_grad,
    }


def _exp_manager(job: Job, generation: NemoGeneration, places: NemoPlaces) -> Config:
    p = job.parallelism
    params = "checkpoint_callback_params"
    found: Config = {
        "explicit_log_dir": str(results_folder(places.run)),
        "exp_dir": None,
        "name": "megatron_gpt",
        "create_wandb_logger": job.wandb is not None,
        "wandb_logger_kwargs.project": job.wandb.project if job.wandb else "nemo_gpt3",
        "wandb_logger_kwargs.name": places.name,
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_checkpoint_callback": True,
        f"{params}.monitor": "val_loss",
        f"{params}.save_top_k": job.checkpoint.keep_last,
        f"{params}.mode": "min",
        f"{params}.always_save_nemo": False,
        f"{params}.save_nemo_on_train_end": False,
        f"{params}.filename": FILENAME,
        f"{params}.model_parallel_size": (
            p.tensor_model_parallel_size * p.pipeline_model_parallel_size
        ),
        "log_step_timing": True,
        "step_timing_kwargs.sync_cuda": True,
        "step_timing_kwargs.buffer_size": 5,
    }
    if job.wandb is not None and job.wandb.entity is not None:
        found["wandb_logger_kwargs.entity"] = job.wandb.entity
    if generation.core and job.checkpoint.save_async:
        found[f"{params}.async_save"] = True
    if generation.core and places.resume is not None:
        # it is read here; NeMo's own file has it as ${model.resume_from_checkpoint}
        found["resume_from_checkpoint"] = places.resume
    return found


def _model(job: Job, generation: NemoGeneration, places: NemoPlaces) -> Config:
    model = job.model
    p = job.parallelism
    chunks = p.virtual_pipeline_model_parallel_size
    found: Config = {
        "micro_batch_size": job.training.micro_batch_size,
        "global_batch_size": job.global_batch_size,
        "tensor_model_parallel_size": p.tensor_model_parallel_size,
        "pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "resume_from_checkpoint": places.resume,
        "encoder_seq_length": model.seq_length,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.num_attention_heads,
        "init_method_std": model.init_method_std,
        "hidden_dropout": model.hidden_dropout,
        "kv_channels": _heads_of_their_own(job),
        "apply_query_key_layer_scaling": True,
        "layernorm_epsilon": model.layernorm_epsilon,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "pre_process": True,
        "post_process": True,
        "persist_layer_norm": True,
        "grad_div_ar_fusion": True,
        "gradient_as_bucket_view": True,
        "gradient_accumulation_fusion": True,
        **_recompute(job, generation),
        "sequence_parallel": p.sequence_parallel,
        "seed": job.training.seed,
        "use_cpu_initialization": False,
        "onnx_safe": False,
        "apex_transformer_log_level": 30,
        "nsys_profile.enabled": False,
        "nsys_profile.trace": ["nvtx", "cuda"],
        "nsys_profile.start_step": 10,
        "nsys_profile.end_step": 10,
        "nsys_profile.ranks": [0],
        "nsys_profile.gen_shape": False,
        **generation.model,
    }
    if generation.core:
        found |= {
            "rampup_batch_size": None,
            "context_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": chunks,
            "attention_dropout": model.attention_dropout,
            "overlap_p2p_comm": chunks is not None,
            "batch_p2p_comm": chunks is None,
            "num_query_groups": _groups(job),
        }
        if model.gelu == "exact":
            found["bias_activation_fusion"] = False  # the fused kernel is the tanh formula
        if model.untied:
            found["share_embeddings_and_output_weights"] = False
    return found | _blocks(model)


def _blocks(model: Model) -> Config:
    """What a family has otherwise than NeMo by itself."""
    if not model.mlp.gated:
        return {}
    found = {key.removeprefix("model."): value for key, value in LLAMA_BLOCKS.items()}
    if model.rotary_base not in (None, 10000.0):
        found["rotary_base"] = model.rotary_base
    return found


def _heads_of_their_own(job: Job) -> int | None:
    """kv_channels where it is not hidden_size / heads."""
    model = job.model
    if model.kv_channels in (None, model.hidden_size // model.num_attention_heads):
        return None
    return model.kv_channels


def _groups(job: Job) -> int | None:
    if job.model.num_query_groups in (None, job.model.num_attention_heads):
        return None
    return job.model.num_query_groups


def _recompute(job: Job, generation: NemoGeneration) -> Config:
    """Nothing is recomputed where 22.09's own files say "full", in blocks, none of them."""
    nothing = (None, None, None) if generation.core else ("full", "block", 0)
    granularity, method, layers = {
        "none": nothing,
        "selective": ("selective", None, None),
        "full": ("full", "uniform", 1),
    }[job.training.recompute_granularity]
    key = "activations_checkpoint"
    return {
        f"{key}_granularity": granularity,
        f"{key}_method": method,
        f"{key}_num_layers": layers,
    }


def _tokenizer(job: Job) -> Config:
    tokenizer = job.dataset.tokenizer
    return {
        "tokenizer.library": "megatron",
        "tokenizer.type": "GPT2BPETokenizer",
        "tokenizer.model": None,
        "tokenizer.delimiter": None,
        "tokenizer.vocab_file": tokenizer.vocab_file if tokenizer else None,
        "tokenizer.merge_file": tokenizer.merge_file if tokenizer else None,
    }


def _precision(job: Job) -> Config:
    training = job.training
    scales: Config = {
        "native_amp_init_scale": 2**32,
        "native_amp_growth_interval": 1000,
        "hysteresis": 2,
    }
    if training.precision == "fp16":
        scales = {
            "native_amp_init_scale": training.initial_loss_scale,
            "native_amp_growth_interval": training.loss_scale_window,
            "hysteresis": training.hysteresis,
        }
    return {
        **scales,
        "fp32_residual_connection": False,
        "fp16_lm_cross_entropy": False,
        "megatron_amp_O2": training.precision != "fp32",
        "grad_allreduce_chunk_size_mb": 125,
    }


def _optim(job: Job, generation: NemoGeneration) -> Config:
    training = job.training
    distributed = job.parallelism.zero_stage == 1
    found: Config = {"name": generation.optimizers[distributed]}
    if distributed:
        found |= generation.optimizer
    found |= {
        "lr": training.lr,
        "weight_decay": training.weight_decay,
        "betas": [training.adam_beta1, training.adam_beta2],
    }
    if training.adam_eps != 1e-8:
        found["eps"] = training.adam_eps
    return found | {
        "sched.name": "CosineAnnealing",
        "sched.warmup_steps": int(training.warmup_iters),
        "sched.constant_steps": max(0, training.train_iters - training.decay_iters),
        "sched.min_lr": training.min_lr,
    }


def _data(job: Job, data: MegatronData, places: NemoPlaces) -> Config:
    training = job.training
    return {
        **data_options(job, data),
        "seq_length": job.model.seq_length,
        "skip_warmup": True,
        "num_workers": 2,
        "dataloader_type": "single",
        "reset_position_ids": training.reset_position_ids,
        "reset_attention_mask": training.reset_attention_mask,
        "eod_mask_loss": training.eod_mask_loss,
        "index_mapping_dir": str(places.index) if places.index else None,
    }
