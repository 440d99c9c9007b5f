"""What of a job GPT-NeoX has no word for, or would do otherwise: said before anything starts;
and its rules for `trainkit.plan`.

Sources: EleutherAI/gpt-neox at ea7aefd; the functions it rests on are named where they matter.
[ds] DeepSpeed: Rajbhandari et al. 2020, arXiv:1910.02054, section 3 (16 bytes); its pipeline
partitions `type:transformer|mlp` unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainkit.base.errors import Problem
from trainkit.data.fetch.ranges import expand
from trainkit.engines.gpt_neox.config import SAID_IN_TABLES
from trainkit.engines.job_values import counterpart_problems
from trainkit.engines.rules import FP32, PUBLISHED, WRITTEN
from trainkit.jobs.datasets import Dataset
from trainkit.jobs.schema import Job
from trainkit.plan.rules import StateBytes

RULES = replace(
    PUBLISHED,
    engine="gpt-neox",
    virtual_stages=False,  # DeepSpeed's pipeline has none
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # [ds]
    states={"fp16": StateBytes(2, 2, 4, 4), "bf16": StateBytes(2, 2, 4, 4), "fp32": FP32},
    saves_scores=True,
    # fp16 logits and gradient, four fp32 copies: 2 GiB of the 20B's 27 GB on 24 A100-40GB
    logit_bytes=20,
    uncounted=("moe_num_experts",),
    bucket_elements=5 * 10**8,  # [ds] reduce_bucket_size; a job's own stands in engine_args
    checkpoint_weights=WRITTEN,
    # the same runs; median 1.18, BLOOM itself 1.47; the 20B of Lambda Labs 1.05
    memory_band=(0.94, 1.47),
)
# Keys that only have their default with gpt-neox, and why.
NO_COUNTERPART: dict[str, str] = {
    "training.rampup_batch_size": "its batch does not grow",
    "training.lr_warmup_init": "its warmup begins at lr / warmup steps",
    "training.z_loss": "it has one for reward models only",
    "training.on_nan": "it only counts such steps",
    "training.on_spike": "it does not look for spikes",
    "training.max_skipped_in_a_row": "it stops after 50",
    "training.recompute_every": "its checkpoint_num_layers is the length of a chunk",
    "training.compile": "it compiles no blocks",
    "training.deterministic": "it has no such switch",
    "training.replay_interval": "engine native does that",
    "training.ema_decay": "engine native does that",
    "training.fp8_recipe": "engine native does that",
    "training.reset_attention_mask": "its tokens see the whole sample",
    "training.reset_position_ids": "its positions go through the whole sample",
    "parallelism.virtual_pipeline_model_parallel_size": "DeepSpeed's stages have one chunk",
    "parallelism.context_parallel_size": "its ranks have whole samples",
    "parallelism.pipeline_schedule": "DeepSpeed's pipeline has one schedule, 1F1B",
    "parallelism.data_parallel_replicate_size": "its ZeRO shards over all data-parallel ranks",
    "model.kv_channels": "its heads have hidden_size / num_attention_heads channels",
    "model.rope_scaling": "its rotary positions are not stretched",
    "checkpoint.keep_every": "it keeps the newest only, keep_last",
    "checkpoint.memory_interval": "engine native does that",
    "checkpoint.keep_best": "it keeps the newest only, keep_last",
    "checkpoint.save_async": "it waits for its saves",
    "checkpoint.save_first": "it saves every save_interval steps and at the end",
    "profile": "its own profilers: engine_args.profile, engine_args.memory_profiling",
    "generate": "its training ends without a sample",
    "validation": "it has one validation set, the dataset's",
    "sample_order": "it builds its own index of samples, beside the data",
    "kernels": "it chooses its kernels by options of its own: engine_args",
    "init_from": "it begins with weights of its own format only: engine_args.load and finetune",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "training.optimizer": ("adam",),
    "training.lr_decay_style": ("cosine", "linear", "constant"),
    "training.recompute_granularity": ("none", "full"),
}
FUSIONS = (
    "scaled_upper_triang_masked_softmax_fusion",
    "scaled_masked_softmax_fusion",
    "rope_fusion",
)
EOD = "<|endoftext|>"  # the only token that HFTokenizer takes for the end of a document
# What DeepSpeed's launcher would lose or execute: it writes export NAME="VALUE" on pdsh's line.
UNSAFE = ('"', "$", "`", "\\", "\n")


def job_problems(job: Job) -> Iterator[Problem]:
    """Everything in the job that GPT-NeoX has no word for."""
    yield from counterpart_problems(job, "gpt-neox", NO_COUNTERPART, CHOICES)
    yield from _number_problems(job)
    yield from _schedule_problems(job)
    yield from _vocabulary_problems(job)
    yield from _dataset_problems(job.dataset)
    yield from _device_problems(job)
    yield from _table_problems(job)
    yield from _pipe_problems(job)


def _number_problems(job: Job) -> Iterator[Problem]:
    t = job.training
    if not 0 < t.seed < 2**32:
        yield Problem(
            f"training.seed = {t.seed}: gpt-neox takes 1 to 2^32 - 1 (it refuses 0, and numpy"
            " what is above)",
            hint="set training.seed, 1234 by default",
        )
    power = math.log2(t.initial_loss_scale)
    if t.precision == "fp16" and not power.is_integer():
        yield Problem(
            f"training.initial_loss_scale = {t.initial_loss_scale}: gpt-neox takes its exponent,"
            " and this is not a power of two",
            hint="65536.0, say",
        )
    base = job.model.rotary_base
    if base is not None and not base.is_integer():
        yield Problem(
            f"model.rotary_base = {base}: gpt-neox takes a whole number", hint="10000.0, say"
        )
    if job.profile is not None and job.profile.ranks != (0,):
        yield Problem(
            f"profile.ranks = {list(job.profile.ranks)} has no counterpart in gpt-neox: every rank"
            " of it is profiled",
            hint="leave profile.ranks out",
        )


def _schedule_problems(job: Job) -> Iterator[Problem]:
    """AnnealingLR.get_lr goes on with the same cosine after its end, and so up again."""
    t = job.training
    if t.lr_decay_style == "cosine" and t.train_iters > t.decay_iters:
        yield Problem(
            f"training.train_iters = {t.train_iters} is beyond lr_decay_iters = {t.decay_iters}:"
            " gpt-neox's cosine rises again after its end, up to the full learning rate",
            hint=(
                f"--set training.lr_decay_iters={t.train_iters} gives the decay its new end (the"
                " learning rate then jumps to the new curve), or use lr_decay_style = 'constant'"
                " or 'linear'"
            ),
        )


def _vocabulary_problems(job: Job) -> Iterator[Problem]:
    tokenizer = job.dataset.tokenizer
    if tokenizer is None:
        yield Problem(
            f"dataset '{job.dataset.name}' has no tokenizer, and gpt-neox counts its vocabulary"
            " from the tokenizer's file",
            hint="use a dataset with a tokenizer and files (source = 'stdlib' needs no download)",
        )
        return
    size = job.model.vocab_size
    if size is not None and tokenizer.vocab_size is not None and size != tokenizer.vocab_size:
        yield Problem(
            f"model.vocab_size = {size}: gpt-neox takes the tokenizer's, {tokenizer.vocab_size},"
            " and pads it to a multiple of make_vocab_size_divisible_by and the tensor-parallel"
            " size",
            hint="leave model.vocab_size out",
        )
    if job.training.eod_mask_loss and tokenizer.eod_token != EOD:
        yield Problem(
            f"training.eod_mask_loss with eod_token = '{tokenizer.eod_token}' of tokenizer"
            f" '{tokenizer.name}': gpt-neox knows the end of a document as {EOD} only, and would"
            " mask nothing",
            hint="leave training.eod_mask_loss out",
        )


def _dataset_problems(dataset: Dataset) -> Iterator[Problem]:
    """Datasets of several pairs that are to be cut; `neox_data` looks again when they are there."""
    if dataset.source == "blend" and (dataset.valid_blend or dataset.test_blend):
        if not (dataset.valid_blend and dataset.test_blend):
            yield _needs_all_splits(dataset, "valid_blend and test_blend")
        return
    parts = [part.dataset for part in dataset.blend.values()] or [dataset]
    for part in parts:
        several = len(parts) > 1 or not part.merge or _pair_count(part) > 1
        held_out = part.valid_files and part.test_files
        if several and not held_out:
            yield _needs_all_splits(part, "valid_files and test_files")


def _needs_all_splits(dataset: Dataset, keys: str) -> Problem:
    return Problem(
        f"datasets.{dataset.name}: gpt-neox cuts one .bin/.idx pair by `split`; of several it reads"
        " each whole, and wants others for train, valid and test",
        hint=f"give datasets.{dataset.name} {keys}, or merge its pairs into one",
    )


def _pair_count(dataset: Dataset) -> int:
    """How many pairs a dataset with source = "indexed" names, as far as its names tell."""
    named = [text for given in dataset.prefixes for text in expand(given)]
    fetched = [text for given in dataset.urls for text in expand(given) if text.endswith(".idx")]
    return (len(named) or len(fetched)) if dataset.source == "indexed" else 1


def _device_problems(job: Job) -> Iterator[Problem]:
    if job.cluster.device_type != "cpu":
        return
    for name in FUSIONS:
        if job.engine_args.get(name):
            yield Problem(
                f"engine_args.{name} = true: its kernel is compiled for CUDA, and"
                f" clusters.{job.cluster.name} has CPUs",
                hint=f"--set engine_args.{name}=false",
            )


def _table_problems(job: Job) -> Iterator[Problem]:
    """Values inside of tables of engine_args that the job itself says."""
    for dotted, key in SAID_IN_TABLES.items():
        value: object = {name.replace("-", "_"): each for name, each in job.engine_args.items()}
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            yield Problem(
                f"engine_args.{dotted}: trainkit sets it itself", hint=f"use {key} for it"
            )


def _pipe_problems(job: Job) -> Iterator[Problem]:
    """One stage is with DeepSpeed's pipeline engine (1) or without it (0), as engine_args say;
    with stock DeepSpeed instead of EleutherAI's fork only the latter evaluates."""
    given = job.engine_args.get("pipe_parallel_size", job.engine_args.get("pipe-parallel-size"))
    stages = job.parallelism.pipeline_model_parallel_size
    if given is not None and given != stages and (given, stages) != (0, 1):
        yield Problem(
            f"engine_args.pipe_parallel_size = {given}, and"
            f" parallelism.pipeline_model_parallel_size = {stages}",
            hint="engine_args may say 0 where there is one stage: without the pipeline engine",
        )


def deepspeed_problems(job: Job) -> Iterator[Problem]:
    """What DeepSpeed's own launcher (launch = "deepspeed") does not do."""
    use_ranks = 'launch = "ranks", the default, does it'
    if job.container is not None:
        yield Problem(
            f"engines launch = 'deepspeed' with container = '{job.container.name}': DeepSpeed's"
            " launcher logs in to the other nodes, outside of the image",
            hint=use_ranks,
        )
    if job.cluster.launcher_traits.batch:
        yield Problem(
            f"engines launch = 'deepspeed' on cluster '{job.cluster.name}' (launcher ="
            f" '{job.cluster.launcher}'): DeepSpeed's launcher needs ssh to the other nodes",
            hint=use_ranks,
        )
    if job.cluster.secrets:
        yield Problem(
            f"engines launch = 'deepspeed' with secrets ({', '.join(job.cluster.secrets)}):"
            " DeepSpeed writes variables on pdsh's command line, which everybody on the nodes can"
            " read",
            hint=use_ranks,
        )
    for name, value in job.environment.items():
        if any(sign in value for sign in UNSAFE):
            yield Problem(
                f"env.{name}: DeepSpeed's launcher writes it between double quotes into a shell"
                " line, which would change or execute its quotes, $, ` and \\",
                hint=use_ranks,
            )
