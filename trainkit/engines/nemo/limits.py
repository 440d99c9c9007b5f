"""What of a job NeMo has no key for, or would do otherwise: said before anything starts;
and its rules for `trainkit.plan`.

Sources: NeMo 1.12 and 2.1, megatron_gpt_model.py, megatron_base_model.py (_validate_config),
utils/exp_manager.py, core/optim/lr_scheduler.py; pytorch-lightning 1.7.7 and 2.4.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from trainkit.base.errors import Problem
from trainkit.engines.hydra_words import Override, hydra_value
from trainkit.engines.job_values import counterpart_problems, said
from trainkit.engines.nemo.config import CONSTANT, SET_BY
from trainkit.engines.nemo.data import PREFIX, data_problems
from trainkit.engines.nemo.generations import NUMA, NemoGeneration
from trainkit.engines.options import OptionTable, check_engine_args
from trainkit.engines.rules import FP32, PUBLISHED, WRITTEN
from trainkit.jobs.schema import Job
from trainkit.plan.rules import StateBytes

RULES = replace(
    PUBLISHED,
    engine="nemo",
    families=("gpt", "llama"),  # Llama: 24.12 alone, which its limits ask
    uneven_stages=False,
    whole_rounds=True,
    zero_stages=(0, 1),
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # Gradients in 16 bits: its 5B runs at micro-batch 2 on one node of A100-80GB without
    # recomputation (22.09's table of throughput), which 18 bytes
    # a parameter would not leave room for.
    states={"fp16": StateBytes(2, 2, 4, 4), "bf16": StateBytes(2, 2, 4, 4), "fp32": FP32},
    saves_scores=True,  # 22.09 has no fused attention
    logit_bytes=10,
    checkpoint_weights=WRITTEN,
    saves_key="exp_manager.create_checkpoint_callback",
    uncounted=("model.num_moe_experts", "model.context_parallel_size"),
)
# Keys that only have their default with nemo, and why.
NO_COUNTERPART: dict[str, str] = {
    "training.rampup_batch_size": "its schedule counts steps of one batch size",
    "training.lr_warmup_init": "its warmup begins at lr / warmup steps",
    "training.z_loss": "it has none",
    "training.loss_scale": "its scale for fp16 always changes",
    "training.on_nan": "it goes on with such steps",
    "training.on_spike": "it does not look for spikes",
    "training.max_skipped_in_a_row": "it does not count them",
    "training.recompute_every": "it recomputes whole blocks of a stage: engine_args say which",
    "training.compile": "it compiles no blocks",
    "training.deterministic": "it has no such switch",
    "training.replay_interval": "engine native does that",
    "training.ema_decay": "engine native does that",
    "training.fp8_recipe": "engine native does that",
    "parallelism.context_parallel_size": "engine_args 'model.context_parallel_size' says it",
    "parallelism.pipeline_schedule": "its pipeline has one schedule, 1F1B",
    "parallelism.data_parallel_replicate_size": "its optimizer shards over all of them",
    "model.rope_scaling": "engine_args 'model.scale_positional_embedding' is Llama 3.1's",
    "checkpoint.keep_every": "it keeps the best, keep_last of them, and the newest",
    "checkpoint.memory_interval": "engine native does that",
    "checkpoint.keep_best": "it keeps the best, keep_last of them, and the newest",
    "checkpoint.save_first": "it saves after a validation",
    "validation": "it has one validation set, the dataset's",
    "sample_order": "it builds its own index of samples",
    "kernels": "it chooses its kernels by options of its own: engine_args",
    "init_from": "engine_args say what it begins with",
    "profile": "engine_args 'model.nsys_profile.enabled' says it, under nsys",
}
# the same, which 24.12 has
ONLY_NEWER: dict[str, str] = {
    "parallelism.virtual_pipeline_model_parallel_size": "its stages have one chunk",
    "checkpoint.save_async": "it waits for its saves",
    "model.num_query_groups": "its heads have keys and values of their own",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": ("gpt", "llama"),
    "model.init_method": ("normal",),
    "model.output_layer_init_method": ("scaled",),
    "training.optimizer": ("adam",),
    "training.lr_decay_style": ("cosine",),
}
_RESUMES = "exp_manager.resume_if_exists"
_FILENAME = "exp_manager.checkpoint_callback_params.filename"


def job_problems(job: Job, generation: NemoGeneration, table: OptionTable) -> Iterator[Problem]:
    """Everything in the job that NeMo does not do.

    Args:
        job: the job.
        generation: which launcher's NeMo.
        table: the keys of its configuration.
    """
    yield from _argument_problems(job, generation, table)
    yield from _table_problems(job, generation)
    if not generation.core:
        yield from _older_problems(job)
    yield from _schedule_problems(job)
    yield from _saving_problems(job)
    yield from _layout_problems(job)
    yield from _tokenizer_problems(job)
    yield from _dataset_problems(job, generation)


def _argument_problems(
    job: Job, generation: NemoGeneration, table: OptionTable
) -> Iterator[Problem]:
    own = ("+", "numa_mapping.")
    known = {key: value for key, value in job.engine_args.items() if not key.startswith(own)}
    known.pop(PREFIX, None)
    yield from check_engine_args(job.model_copy(update={"engine_args": known}), table, SET_BY)
    for key, value in job.engine_args.items():
        if key.startswith("+"):
            yield from _added_problems(key, value, table)
        elif key.startswith("numa_mapping."):
            yield from _numa_problems(key, value, generation)
    filename = job.engine_args.get(_FILENAME)
    if filename is not None and not (
        "{step}" in str(filename) and "{consumed_samples}" in str(filename)
    ):
        yield Problem(
            f"engine_args.'{_FILENAME}': it has to hold {{step}} and {{consumed_samples}}, by which"
            " a run goes on (NeMo reads the samples from the name)",
        )


def _added_problems(key: str, value: object, table: OptionTable) -> Iterator[Problem]:
    """Of a key with hydra's "+", which adds what no configuration has."""
    path = key.lstrip("+")
    if path in SET_BY:
        yield Problem(f"engine_args.'{key}': trainkit sets it itself", hint=f"use {SET_BY[path]}")
    elif path in table:
        yield Problem(
            f"engine_args.'{key}': {table.engine} {table.version} has that key",
            hint=f"write engine_args.'{path}', without the plus",
        )
    elif not re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", path):
        yield Problem(f"engine_args.'{key}' is not a key with dots", hint="+model.name, say")
    else:
        try:
            hydra_value(value)
            Override(path, value, "+").word()
        except ValueError as error:
            yield Problem(f"engine_args.'{key}': {error}")


def _numa_problems(key: str, value: object, generation: NemoGeneration) -> Iterator[Problem]:
    """Of the launcher's own table numa_mapping (conf/config.yaml)."""
    name = key.removeprefix("numa_mapping.")
    usual = NUMA.get(name)
    if generation.core:
        yield Problem(f"engine_args.'{key}': the launcher of 24.12 binds no rank", hint="remove it")
    elif usual is None:
        yield Problem(
            f"engine_args.'{key}': the launcher has no such key", hint=f"one of {', '.join(NUMA)}"
        )
    elif type(value) is not type(usual):
        yield Problem(f"engine_args.'{key}': expected {type(usual).__name__}, got {value!r}")


def _table_problems(job: Job, generation: NemoGeneration) -> Iterator[Problem]:
    why = dict(NO_COUNTERPART)
    if not generation.core:
        why |= ONLY_NEWER
    if job.model.num_query_groups == job.model.num_attention_heads:
        why.pop("model.num_query_groups", None)
    yield from counterpart_problems(job, f"nemo {generation.version}", why, CHOICES)


def _older_problems(job: Job) -> Iterator[Problem]:
    """Of 22.09, whose configuration has fewer keys: the rest is fixed in its code."""
    model = job.model
    fixed = {
        "model.family": (model.family, "gpt"),
        "model.attention_dropout": (model.attention_dropout, 0.1),
        "model.gelu": (model.gelu, "tanh"),
        "model.untie_embeddings_and_output_weights": (
            model.untie_embeddings_and_output_weights,
            False,
        ),
    }
    for key, (value, only) in fixed.items():
        if value != only:
            yield Problem(
                f"{key} = {said(value)}: NeMo of 22.09 has {said(only)} in its code, and no key for"
                " it",
                hint=f"set {key} = {said(only)}, or use the NeMo of 24.12",
            )


def _schedule_problems(job: Job) -> Iterator[Problem]:
    training = job.training
    if not float(training.warmup_iters).is_integer():
        yield Problem(
            f"training.lr_warmup_fraction {training.lr_warmup_fraction}: {training.warmup_iters:g}"
            " steps of warmup, and NeMo takes whole ones",
            hint="set training.lr_warmup_iters",
        )
    if training.min_lr > training.lr:
        yield Problem(f"training.min_lr {training.min_lr:g} is above lr {training.lr:g}")
    warmed = training.train_iters <= training.warmup_iters
    if training.decay_iters > training.train_iters and not warmed:
        yield Problem(
            f"training.lr_decay_iters {training.decay_iters} is beyond train_iters"
            f" {training.train_iters}: NeMo's cosine ends with the training, less constant_steps",
            hint=f"--set training.lr_decay_iters={training.train_iters}",
        )
    given = job.engine_args.get(CONSTANT)
    constant = training.train_iters - training.decay_iters
    if given is not None and not warmed and given != constant:
        yield Problem(
            f"engine_args.'{CONSTANT}' {given} is not train_iters less lr_decay_iters, {constant}",
            hint=f"set training.lr_decay_iters = {training.train_iters} - constant_steps",
        )


def _saving_problems(job: Job) -> Iterator[Problem]:
    """exp_manager saves after a validation, by its loss, and at the end."""
    training = job.training
    if (
        job.engine_args.get(_RESUMES) is False
        and job.engine_args.get("exp_manager.create_checkpoint_callback") is not False
    ):
        yield Problem(
            f"engine_args.'{_RESUMES}' = false: each attempt of a run that was stopped would begin"
            " again, beside the checkpoints of those before",
            hint="leave it out; `invoke train` begins a new run each time",
        )
    if training.eval_iters == 0:
        yield Problem(
            "training.eval_iters 0: NeMo saves after a validation, by its loss",
            hint="set training.eval_iters, 1 at least",
        )
    saved = training.save_interval
    validated = training.eval_interval or training.train_iters
    if saved is not None and saved != validated:
        yield Problem(
            f"training.save_interval {saved} and eval_interval {validated}: NeMo saves after each"
            " validation, and at no other step",
            hint="give both the same value",
        )
    if training.eval_interval is not None and training.eval_interval > training.train_iters:
        yield Problem(
            f"training.eval_interval {training.eval_interval} is beyond train_iters"
            f" {training.train_iters}: pytorch-lightning refuses it (val_check_interval)",
            hint=f"--set training.eval_interval={training.train_iters} validates once, at the end",
        )


def _layout_problems(job: Job) -> Iterator[Problem]:
    p = job.parallelism
    model = job.model
    stages = p.pipeline_model_parallel_size * (p.virtual_pipeline_model_parallel_size or 1)
    divided = {
        "model.num_layers": (model.num_layers, stages, "pipeline stages and their chunks"),
        "model.hidden_size": (model.hidden_size, model.num_attention_heads, "heads"),
        "model.num_attention_heads": (
            model.num_attention_heads,
            p.tensor_model_parallel_size,
            "tensor-parallel ranks",
        ),
    }
    for key, (value, by, what) in divided.items():
        if value % by:
            yield Problem(f"{key} {value} does not divide by {by} {what}, as NeMo asserts")
    if p.zero_stage > 1:
        yield Problem(
            f"parallelism.zero_stage {p.zero_stage}: NeMo's distributed optimizer is stage 1",
            hint="set parallelism.zero_stage = 1",
        )
    if job.training.precision == "fp32" and p.zero_stage == 1:
        yield Problem(
            "training.precision = 'fp32' with parallelism.zero_stage 1: NeMo's distributed"
            " optimizer is for 16 bits",
            hint="set parallelism.zero_stage = 0",
        )


def _tokenizer_problems(job: Job) -> Iterator[Problem]:
    tokenizer = job.dataset.tokenizer
    if tokenizer is None or tokenizer.type != "gpt2":
        name = tokenizer.name if tokenizer else "none"
        yield Problem(
            f"tokenizers.{name}: NeMo is given GPT-2's files, vocab.json and merges.txt",
            hint="use a dataset whose tokenizer has type = 'gpt2'",
        )
        return
    asked = job.model.vocab_size
    if asked is not None and tokenizer.vocab_size and asked != tokenizer.vocab_size:
        yield Problem(
            f"model.vocab_size {asked}: NeMo takes the {tokenizer.vocab_size:,} of"
            f" tokenizers.{tokenizer.name}, and pads them",
            hint="leave model.vocab_size out",
        )


def _dataset_problems(job: Job, generation: NemoGeneration) -> Iterator[Problem]:
    dataset = job.dataset
    if generation.core:
        yield from data_problems(job, ())
        return
    apart = ("valid_blend", "test_blend", "valid_files", "test_files")
    yield from data_problems(job, [key for key in apart if getattr(dataset, key)])
    if dataset.source == "mock":
        yield Problem(
            "dataset = 'mock': NeMo of 22.09 has no random data",
            hint="give a dataset with files",
        )
