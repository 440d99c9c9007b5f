"""Checks of what a job reads: tokenizer, the first batch of every data-parallel rank, validation
sets, the weights that it begins with."""

from __future__ import annotations

from pathlib import Path

import torch

from trainkit.base.errors import ConfigError, raise_problems
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.order.open import refuse_without_samples
from trainkit.data.order.resolve_pairs import pairs_of
from trainkit.data.sources.tokenizers import FILES
from trainkit.data.tokenizer import end_of_document, given_tokenizer, load_tokenizer
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.plan.batch import global_batch_size
from trainkit.plan.mixtures import spans_of
from trainkit.rehearse.scene import Check, NotLookedAt, RehearsalScene
from trainkit.train.batches import Feed, data_folder, vocab_size
from trainkit.train.huggingface import check_weights, weights_folder
from trainkit.train.parallel.data_parallel import World

LOOKED_AT = 2**20  # tokens at the beginning of a pair


def check_tokenizer(scene: RehearsalScene) -> str:
    """The tokenizer can be read, has its end of document, and no id beyond the model's rows."""
    job = scene.job
    settings = job.dataset.tokenizer
    if settings is None:
        return f"{job.dataset.name} has none; vocabulary {vocab_size(job)}"
    made = data_folder(job).tokenizer
    if made.is_file():
        tokenizer = load_tokenizer(made)
        end_of_document(tokenizer, settings.eod_token, made)
        size = tokenizer.get_vocab_size()
    else:
        size = _given_size(settings)
        _refuse_foreign_ids(job, settings, size)
        if job.model.vocab_size is None:
            return f"{settings.name}: {size} ids, and so many rows has the model"
    rows = vocab_size(job)
    if size > rows:
        raise ConfigError(
            f"tokenizer {settings.name} has {size} ids, and the model {rows} rows",
            hint=f"raise models.{job.model.name}.vocab_size to {size}, or leave it out",
        )
    if settings.vocab_size and size < settings.vocab_size and settings.type != "bpe":
        raise ConfigError(
            f"tokenizers.{settings.name}.vocab_size says {settings.vocab_size}, and its files have"
            f" {size} ids",
            hint="correct it, or name the files that belong to it",
        )
    return f"{settings.name}: {size} ids; the model has {rows} rows"


def _given_size(settings: Tokenizer) -> int:
    """Ids of a tokenizer that was not prepared yet, from the files that it will be made of."""
    for key, address in FILES:
        path = getattr(settings, key)
        if path and getattr(settings, address) and not Path(path).exists():
            raise NotLookedAt(f"{path} is fetched when the data are prepared: see stages")
    if settings.type == "bpe":
        raise NotLookedAt(f"{settings.name} is trained when its data are prepared: see stages")
    return given_tokenizer(settings).get_vocab_size()


def _refuse_foreign_ids(job: Job, settings: Tokenizer, size: int) -> None:
    """Of pairs that somebody else wrote, and that were not read yet: raise ConfigError for an id
    beyond the tokenizer's at their beginnings."""
    root = job.cluster.root_folder
    indexed = [each for each in job.training_datasets if each.source == "indexed"]
    try:
        pairs = [pair for dataset in indexed for pair in pairs_of(root, dataset, "train")]
    except ConfigError:
        return  # said by stages
    for pair in pairs:
        tokens = IndexedDataset(pair.prefix).tokens[:LOOKED_AT]
        if len(tokens) and (highest := int(tokens.max())) >= size:
            raise ConfigError(
                f"{pair.prefix}.bin holds the id {highest}, and tokenizer {settings.name} has"
                f" {size} ids",
                hint="name the tokenizer that these pairs were written with: another wrote them",
            )


def check_batches(scene: RehearsalScene) -> str:
    """The first micro-batch of every data-parallel rank can be read, now and where a phase begins,
    and has ids of the model."""
    job = scene.job
    scene.require_stages()
    refuse_without_samples(job)
    if not job.is_native:
        raise NotLookedAt(f"engine {job.engine} reads its data itself; the files can be opened")
    saved = scene.newest_checkpoint
    consumed = saved.manifest.consumed_samples if saved else 0
    ranks = job.data_parallel_size
    samples = ranks * job.training.micro_batch_size
    if samples > global_batch_size(job, consumed):
        raise NotLookedAt("the batch does not divide over the ranks: see plan")
    starts = [consumed, *(span.first for span in spans_of(job) if span.first > consumed)]
    # One reader of all: data-parallel rank r has the r-th micro-batch of these.
    feed = Feed(job, None, "train", World(0, 1), torch.device("cpu"))
    try:
        seen = [batch.checksum for at in starts for batch in feed.read(at, samples)]
    finally:
        feed.close()
    if len(seen) != ranks * len(starts):
        raise ConfigError(f"{len(seen)} micro-batches for {ranks} data-parallel ranks")
    tokens = job.model.seq_length
    words = " and ".join(map(str, starts))
    return f"one of each of {ranks} ranks, {samples} samples of {tokens} tokens, from {words}"


def check_validation(scene: RehearsalScene) -> str:
    """The first batch of each validation set can be read."""
    job = scene.job
    if not job.training.eval_iters:
        return "no evaluations (eval_iters = 0)"
    if not job.is_native:
        raise NotLookedAt(f"engine {job.engine} reads its data itself")
    scene.require_stages()
    sets: dict[str, Dataset] = {"valid": job.dataset, **job.validation}
    for dataset in sets.values():
        feed = Feed(job, dataset, "valid", World(0, 1), torch.device("cpu"))
        try:
            next(iter(feed.read(0, job.training.micro_batch_size)))
        finally:
            feed.close()
    return f"{', '.join(sets)}: can be read"


def check_layout(scene: RehearsalScene) -> str:
    """The ranks can share the work, and the weights that a new run begins with fit the model."""
    job = scene.job
    if not job.is_native:
        raise NotLookedAt(f"engine {job.engine} has its own, which the plan asks")
    scene.require_layout()
    begins = scene.run is None and job.init_from is not None
    if begins:
        scene.require_stages()
        raise_problems(check_weights(weights_folder(job), job.model, vocab_size(job)))
        return f"weights of {job.init_from} fit the model"
    degrees = degrees_of(job)
    context = f"{degrees.context} context-parallel x " if degrees.context > 1 else ""
    return (
        f"{degrees.pipeline} stages x {degrees.data} data-parallel x {context}{degrees.tensor}"
        " tensor-parallel ranks"
    )


OF_THE_DATA: tuple[tuple[str, Check], ...] = (
    ("tokenizer", check_tokenizer),
    ("batches", check_batches),
    ("validation", check_validation),
    ("layout", check_layout),
)
