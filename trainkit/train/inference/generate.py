"""Text from a run's checkpoint: one prompt after another, one token at a time over a cache of
keys and values.

Prompts are not batched: a matrix product of another height rounds otherwise, and what a prompt
gives would then depend on its neighbours.

Shapes: B = 1, S tokens that are read at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.folder import RunFolder
from trainkit.train.decoding.sampling import Sampling, choose
from trainkit.train.inference.load import (
    ALONE,
    PRECISIONS,
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
from trainkit.train.model.attention import KeyValueCache
from trainkit.train.model.transformer import Block, Transformer
from trainkit.train.parallel.tensor_group import TensorGroup

PIECE = 512  # tokens of a prompt read at once: bounds the memory of their logits


@dataclass(frozen=True)
class Generation:
    """A prompt and what the model went on with.

    Args:
        prompt: as given.
        text: the prompt and what follows.
        tokens: how many follow.
    """

    prompt: str
    text: str
    tokens: int


def generate(
    run: RunFolder,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    step: int | None = None,
    device: str = "",
    ranks: int = 1,
    together: StartRanks = start_no_ranks,
) -> tuple[int, list[Generation]]:
    """(step of the checkpoint, what the model writes after each prompt).

    Args:
        run: the run, with at least one checkpoint.
        prompts: the texts to go on from; an empty one: the beginning of a document. A prompt's
            text depends on no other prompt.
        sampling: how tokens are drawn.
        max_new_tokens: how many tokens at most, of each.
        step: of the checkpoint; None: the newest valid one.
        device: "cpu" or "cuda"; empty: what the job computes on.
        ranks: tensor-parallel ranks that the model is split over; 1: this process holds it.
        together: starts them.

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
    job = read_job(run.job)
    load_own_tokenizer(job)
    on = choose_device(job, device)
    refuse_unsplittable(job, ranks, on)
    saved = choose_checkpoint(run, step)
    if ranks == 1:
        return saved.manifest.step, generations(
            job, saved, on, prompts, sampling, max_new_tokens=max_new_tokens
        )
    request = GenerateRequest(tuple(prompts), asdict(sampling), max_new_tokens)
    spec = WorkerSpec(job, saved.folder, on.type, request)
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
    found = []
    for prompt in prompts:
        # as prep-data encodes
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
        new = continuation(
            model,
            ids,
            sampling,
            max_new_tokens=max_new_tokens,
            end=end,
            apart=job.training.reset_attention_mask,
        )
        # Decoded together: a decoder may treat the first token of a text in its own way.
        text = tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]
        found.append(Generation(prompt, prompt + text, len(new)))
    return found


class DecodingState:
    """What a model has read of one text. It sees the last `model.positions` tokens: once the
    text is longer, each further token moves that window, every position in it changes, and all
    of it is read again.

    Args:
        model: in the state of evaluation.
        capacity: tokens of the text, if it is known to be shorter than the window.
    """

    def __init__(self, model: Transformer, capacity: int | None = None) -> None:
        shape = model.shape
        weight = model.embed_tokens.weight
        self.model = model
        self.window = min(shape.positions, capacity or shape.positions)
        self.ids: list[int] = []
        self.caches = [
            KeyValueCache(
                1,
                block.attention.widths[1] // shape.head_size,
                self.window,
                shape.head_size,
                dtype=weight.dtype,
                device=weight.device,
            )
            for block in model.layers.values()
            if isinstance(block, Block)
        ]

    def reset(self) -> None:
        """Begin another text."""
        self.ids = []
        for cache in self.caches:
            cache.length = 0

    @torch.inference_mode()
    def read(self, ids: Sequence[int], piece: int = PIECE) -> Tensor:
        """Read on by at least one token, `piece` at a time; the logits of what follows the last,
        (V)."""
        self.ids += ids
        if len(self.ids) > self.window:
            ids = self.ids[-self.window :]
            self.reset()
            self.ids += ids
        device = self.caches[0].k_BGTD.device
        for start in range(0, len(ids), piece):
            logits_BSV: Tensor = self.model(
                torch.tensor([ids[start : start + piece]], device=device), caches=self.caches
            )
        return logits_BSV[0, -1]


def continuation(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end: int,
    apart: bool = False,
) -> list[int]:
    """Ids that follow `prompt`, up to `end`, which is not among them.

    Args:
        model: in the state of evaluation.
        prompt: at least one id.
        sampling: how tokens are drawn.
        max_new_tokens: how many at most.
        end: the id that ends a document.
        apart: the model was trained on documents that do not see each other, so that one begins
            without the `end` of the one before.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    state = DecodingState(model, len(prompt) + max_new_tokens)
    new: list[int] = []
    following: Sequence[int] = prompt
    while len(new) < max_new_tokens:
        token = choose(state.read(following), sampling, generator)
        if token == end:
            break
        if apart and state.ids[-1] == end:
            state.reset()
        new.append(token)
        following = [token]
    return new
