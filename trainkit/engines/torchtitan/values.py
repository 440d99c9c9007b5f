"""A job as torchtitan has it: the document that inside/config.py makes a configuration of, and
what has no counterpart there.

Sources: torchtitan 0.3.0, config/configs.py, components/optimizer/lr_scheduler.py,
components/checkpointer/, models/llama3 and models/qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainkit.base.errors import Problem
from trainkit.engines.job_values import counterpart_problems, said
from trainkit.jobs.schema import Job, Model, Training
from trainkit.plan.layout import layout_of

Values = dict[str, object]
# models that it has, and how queries and keys of their heads are normalized
NORMS_OF_HEADS = {"llama": "none", "qwen3": "head"}
FAMILIES = tuple(NORMS_OF_HEADS)
STRETCHED = ("llama",)  # those whose positions can be stretched, as in Llama 3.1 alone
WIDE_HEADS = ("qwen3",)  # those whose heads may be wider than hidden_size / num_attention_heads
NO_COUNTERPART: dict[str, str] = {
    "training.rampup_batch_size": "its batch does not grow",
    "training.z_loss": "it has none",
    "training.on_nan": "it ends at a loss that is no number, if that is of a step that it logs",
    "training.on_spike": "it does not look for spikes",
    "training.max_skipped_in_a_row": "it skips no step",
    "training.recompute_every": "it recomputes every block or none",
    "training.replay_interval": "engine native does that",
    "training.ema_decay": "engine native does that",
    "training.fp8_recipe": "engine native does that",
    "training.eod_mask_loss": "its loss has no mask of its own",
    "parallelism.virtual_pipeline_model_parallel_size": (
        "its schedules have names: engine_args.parallelism.pipeline_parallel_schedule"
    ),
    "model.attention_dropout": "it has no dropout",
    "model.hidden_dropout": "it has no dropout",
    "checkpoint.keep_every": "it keeps the newest only, keep_last",
    "checkpoint.keep_best": "it keeps the newest only, keep_last",
    "checkpoint.memory_interval": "engine native does that",
    "checkpoint.save_first": "it saves every save_interval steps and at the end",
    "model.init_method": "it begins by a rule of its own",
    "model.init_method_std": "it begins by a rule of its own",
    "model.output_layer_init_method": "it begins by a rule of its own",
    "profile": "it has a profiler of its own: engine_args.profiler.enable_profiling",
    "wandb": "it has its own: engine_args.metrics.enable_wandb",
    "generate": "its training ends without a sample",
    "validation": "it has one validation set, the dataset's",
    "sample_order": "trainkit gives it its own order",
    "kernels": "it has its own",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "training.optimizer": ("adam",),
    "training.precision": ("fp32", "bf16"),
    "training.lr_decay_style": ("cosine", "linear", "constant", "WSD"),
    "parallelism.pipeline_schedule": ("1f1b",),
    "parallelism.cp_comm_type": ("p2p",),
}
# what trainkit says, and by which key
SET_BY = {
    "training.local_batch_size": "training.micro_batch_size",
    "training.global_batch_size": "training.global_batch_size",
    "training.seq_len": "model.seq_length",
    "training.steps": "training.train_iters",
    "training.max_norm": "training.clip_grad",
    "training.mixed_precision_param": "training.precision",
    "lr_scheduler.warmup_steps": "training.lr_warmup_iters",
    "lr_scheduler.total_steps": "training.lr_decay_iters",
    "lr_scheduler.decay_ratio": "training.lr_decay_style",
    "lr_scheduler.decay_type": "training.lr_decay_style",
    "lr_scheduler.min_lr_factor": "training.min_lr",
    "parallelism.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_size",
    "parallelism.data_parallel_shard_degree": "parallelism.zero_stage",
    "parallelism.fsdp_reshard_after_forward": "parallelism.zero_stage",
    "parallelism.tensor_parallel_degree": "parallelism.tensor_model_parallel_size",
    "parallelism.enable_sequence_parallel": "parallelism.sequence_parallel",
    "parallelism.pipeline_parallel_degree": "parallelism.pipeline_model_parallel_size",
    "parallelism.pipeline_parallel_microbatch_size": "training.micro_batch_size",
    "parallelism.context_parallel_degree": "parallelism.context_parallel_size",
    "parallelism.expert_parallel_degree": "parallelism.expert_model_parallel_size",
    "checkpoint.enable": "training.save_interval",
    "checkpoint.folder": "training.save_interval",
    "checkpoint.interval": "training.save_interval",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.async_mode": "checkpoint.save_async",
    "checkpoint.last_save_model_only": "training.save_interval",
    "checkpoint.load_step": "training.save_interval",
    "compile.enable": "training.compile",
    "metrics.log_freq": "training.log_interval",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "validator.enable": "training.eval_interval",
    "validator.freq": "training.eval_interval",
    "validator.steps": "training.eval_iters",
}


def job_problems(job: Job) -> Iterator[Problem]:
    """Everything in the job that torchtitan has no word for."""
    yield from counterpart_problems(job, "torchtitan", NO_COUNTERPART, CHOICES)
    if job.training.reset_attention_mask != job.training.reset_position_ids:
        yield Problem(
            "training.reset_attention_mask and reset_position_ids: torchtitan has both or none",
            hint="set both, or leave both out",
        )
    if job.checkpoint.keep_last == 1:
        yield Problem(
            "checkpoint.keep_last = 1: torchtitan keeps two at least, for one may be half written",
            hint="--set checkpoint.keep_last=2",
        )
    if job.init_from and "checkpoint.initial_load_path" in job.engine_args:
        yield Problem(
            "init_from and engine_args.checkpoint.initial_load_path: a run begins with one of them",
            hint="init_from is a folder of Hugging Face's form, initial_load_path one of its own",
        )
    if job.training.lr == 0:
        yield Problem("training.lr = 0: torchtitan has rates as parts of lr", hint="raise it")
    if job.model.family not in FAMILIES:
        yield Problem(
            f"models.{job.model.name}.family = '{job.model.family}': with engine = 'torchtitan'"
            f" this version trains {' and '.join(FAMILIES)}",
            hint="engine = 'native' has it",
        )
    else:
        yield from _block_problems(job)


def _block_problems(job: Job) -> Iterator[Problem]:
    """Its blocks are those of the published models."""
    m = job.model
    heads = m.num_attention_heads * m.head_size
    if m.family not in WIDE_HEADS and heads != m.hidden_size:
        yield Problem(
            f"models.{m.name}.kv_channels: torchtitan's {m.family} has heads of hidden_size /"
            " num_attention_heads",
            hint="leave kv_channels out",
        )
    if m.rope_scaling and (m.family not in STRETCHED or m.rope_scaling.type != "llama3"):
        yield Problem(
            f"models.{m.name}.rope_scaling of type '{m.rope_scaling.type}': torchtitan's {m.family}"
            f" has {'that of llama3 alone' if m.family in STRETCHED else 'none'}",
            hint="engine = 'native' has it",
        )
    for key, value, known in (
        ("qk_norm", m.query_key_norm, NORMS_OF_HEADS[m.family]),
        ("activation", m.activation or m.architecture.activation, "swiglu"),
        ("rotary_percent", m.rotary_percent or 1.0, 1.0),
        ("add_qkv_bias", m.qkv_bias, False),
    ):
        if value != known:
            yield Problem(
                f"models.{m.name}: {key} = {said(value)}; torchtitan's {m.family} has"
                f" {said(known)}",
                hint="engine = 'native' has it",
            )


def document(
    job: Job,
    run: Path,
    load_step: int | None,
    vocab: int,
    splits: Values,
    weights: Path | None = None,
) -> Values:
    """What inside/config.py reads.

    Args:
        job: the job.
        run: the run's folder.
        load_step: of the checkpoint that it goes on from; None: from the beginning.
        vocab: rows of the embedding.
        splits: `train` and `valid`, as inside/samples.py takes them, and `end_of_document`.
        weights: a folder of Hugging Face's form that a new run begins with.
    """
    t = job.training
    begins = {"initial_load_path": str(weights), "initial_load_in_hf": True} if weights else {}
    return {
        "dump_folder": str(run),
        "model": shape_of(job.model, vocab),
        "recompute": t.recompute_granularity,
        "compile": t.compile,
        "adamw": {
            "lr": t.lr,
            "betas": [t.adam_beta1, t.adam_beta2],
            "eps": t.adam_eps,
            "weight_decay": t.weight_decay,
        },
        "implementation": "foreach" if job.cluster.device_type == "cpu" else "fused",
        "schedule": schedule_of(t),
        "training": _training(job),
        "parallelism": _parallelism(job),
        "checkpoint": {
            "enable": True,
            "folder": "checkpoints",
            "interval": t.save_interval or t.train_iters,
            "last_save_model_only": False,
            "keep_latest_k": job.checkpoint.keep_last or 0,
            "async_mode": "async" if job.checkpoint.save_async else "disabled",
            "load_step": -1 if load_step is None else load_step,
            **begins,
        },
        "metrics": {"log_freq": t.log_interval, "disable_color_printing": True},
        "debug": {
            "seed": t.seed,
            "deterministic": t.deterministic,
            "enable_structured_logging": False,
        },
        "validation": {
            "enable": t.eval_iters > 0,
            "freq": t.eval_interval or t.train_iters,
            "steps": _eval_steps(job) or 1,
        },
        **splits,
    }


def _eval_steps(job: Job) -> int:
    """Its validator counts local batches, eval_iters global ones."""
    whole = layout_of(job).pipeline > 1
    return job.training.eval_iters * (1 if whole else job.gradient_accumulation_steps)


def shape_of(m: Model, vocab: int) -> Values:
    """A model as inside/config.py takes it, with so many rows of the embedding."""
    return {
        "family": m.family,
        "dim": m.hidden_size,
        "n_layers": m.num_layers,
        "n_heads": m.num_attention_heads,
        "n_kv_heads": m.query_groups,
        "head_dim": m.head_size,
        "hidden_dim": m.ffn_width,
        "vocab_size": vocab,
        "theta": m.theta,
        "scaling": _scaling(m),
        "max_seq_len": m.seq_length,
        "eps": m.layernorm_epsilon,
        "tied": m.tied,
    }


def _scaling(m: Model) -> Values:
    """Of positions, as its RoPE.Config has it."""
    if m.rope_scaling is None:
        return {}
    return {
        "scaling": "llama",
        "scaling_factor": m.rope_scaling.factor,
        "low_freq_factor": m.rope_scaling.low_freq_factor,
        "high_freq_factor": m.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": m.rope_scaling.original_max_position_embeddings,
    }


def schedule_of(t: Training) -> Values:
    """Learning rates, as inside/native_rules.py takes them."""
    stable = t.lr_decay_style == "WSD"
    return {
        "lr": t.lr,
        "begin": t.lr_warmup_init,
        "min_lr": t.min_lr,
        "warmup": t.warmup_iters,
        "fall": t.decay_iters - (t.lr_wsd_decay_iters or 0) if stable else t.warmup_iters,
        "decay": t.decay_iters,
        "shape": t.lr_wsd_decay_style if stable else t.lr_decay_style,
    }


def _training(job: Job) -> Values:
    """In a pipeline its local batch is what one step takes, cut into micro-batches."""
    rounds = job.gradient_accumulation_steps if layout_of(job).pipeline > 1 else 1
    return {
        "local_batch_size": job.training.micro_batch_size * rounds,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.model.seq_length,
        "steps": job.training.train_iters,
        "max_norm": job.training.clip_grad or float(2**127),  # 0 would stop all
        "disable_cuda_graphs": True,
        "mixed_precision_param": "bfloat16" if job.training.precision == "bf16" else "float32",
    }


def _parallelism(job: Job) -> Values:
    """Under ZeRO 0 the data-parallel ranks are copies (DDP)."""
    layout = layout_of(job)
    copies = layout.data if job.parallelism.zero_stage == 0 else layout.replicate
    return {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": layout.data // copies,
        "fsdp_reshard_after_forward": "always" if job.parallelism.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tensor,
        "enable_sequence_parallel": layout.sequence,
        "context_parallel_degree": layout.context,
        "pipeline_parallel_degree": layout.pipeline,
        "pipeline_parallel_microbatch_size": job.training.micro_batch_size,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
