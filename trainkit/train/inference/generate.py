"""Text from a run's checkpoint: one prompt after another, one token at a time over a cache of
keys and values.

Prompts are not batched: a matrix product of another height rounds otherwise, and what a prompt
gives would then depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from trainkit.base.errors import ConfigError
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.folder import RunFolder
from trainkit.train.decoding.continuation import Continuations, Generation, continued_text
from trainkit.train.decoding.sampling import Sampling
from trainkit.train.inference.load import (
    ALONE,
    PRECISIONS,
    TRAINED,
    choose_checkpoint,
    choose_device,
    load_model,
    load_own_tokenizer,
    refuse_unsplittable,
)
from trainkit.train.inference.ranks import (
    WORKER_ARGV,
    GenerateRequest,
    StartRanks,
    WorkerSpec,
    start_no_ranks,
)
from trainkit.train.parallel.tensor_group import TensorGroup


def generate(
    run: RunFolder,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    step: int | None = None,
    weights: str = TRAINED,
    device: str = "",
    split: tuple[int, StartRanks] = (1, start_no_ranks),
) -> tuple[int, list[Generation]]:
    """(step of the checkpoint, what the model writes after each prompt).

    Args:
        run: the run, with at least one checkpoint.
        prompts: the texts to go on from; an empty one: the beginning of a document. A prompt's
            text depends on no other prompt.
        sampling: how tokens are drawn.
        max_new_tokens: how many tokens at most, of each.
        step: of the checkpoint; None: the newest valid one.
        weights: of it: one of load.WEIGHTS.
        device: "cpu" or "cuda"; empty: what the job computes on.
        split: tensor-parallel ranks that the model is split over, and what starts them; 1: this
            process holds it.

    Raises:
        ConfigError: exit 3, a prompt is not Unicode, the run has mock data, its tokenizer is
            gone, this machine lacks the device, or so many ranks cannot share the model.
        TrainkitError: exit 16, no such checkpoint; exit 9, the logits are not finite.
    """
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ConfigError(
                f"prompt {prompt!r} is not Unicode text: it holds half of a surrogate pair, or"
                " bytes that are not UTF-8"
            )
    ranks, together = split
    job = read_job(run.job)
    load_own_tokenizer(job)
    on = choose_device(job, device)
    refuse_unsplittable(job, ranks, on)
    saved = choose_checkpoint(run, step, weights)
    if ranks == 1:
        return saved.manifest.step, generations(
            job, saved, on, prompts, sampling, max_new_tokens=max_new_tokens
        )
    request = GenerateRequest(tuple(prompts), asdict(sampling), max_new_tokens)
    spec = WorkerSpec(job, saved.folder, on.type, weights, generate=request)
    result = together(WORKER_ARGV, spec.to_json(), ranks, on.type)
    return saved.manifest.step, [Generation(**found) for found in result["generations"]]


def generations(
    job: Job,
    saved: Checkpoint,
    device: torch.device,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    group: TensorGroup = ALONE,
) -> list[Generation]:
    """What the model of a checkpoint writes after each prompt; it ends early at the end of a
    document.

    Args:
        job: the run's.
        saved: the checkpoint.
        device: where the model computes.
        prompts, sampling, max_new_tokens: as of `generate`.
        group: the ranks that the model is split over; each finds the same, for they see the same
            logits and draw the same numbers.
    """
    tokenizer, end = load_own_tokenizer(job)
    # The head is not padded: for one row at a time that would copy its weight for every token, and
    # no kernel gains by it.
    bare = job.model_copy(
        update={"model": job.model.model_copy(update={"make_vocab_size_divisible_by": 1})}
    )
    model = load_model(bare, saved, device, PRECISIONS[job.training.precision], group)
    asked = Continuations(sampling, max_new_tokens, end, apart=job.training.reset_attention_mask)
    return [continued_text(model, tokenizer, prompt, asked) for prompt in prompts]
