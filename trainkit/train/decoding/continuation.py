"""A text that goes on, one token at a time over a cache of keys and values.

Shapes: B = 1, S tokens that are read at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainkit.train.decoding.sampling import Sampling, choose
from trainkit.train.model.attention import KeyValueCache
from trainkit.train.model.transformer import Block, Transformer

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


class DecodingState:
    """What a model has read of one text. It sees the last `model.positions` tokens: once the
    text is longer, each further token moves that window, every position in it changes, and all
    of it is read again.

    Args:
        model: in the state of evaluation.
        capacity: tokens of the text, if it is known to be shorter than the window.
        computes: see `Continuations`.
    """

    def __init__(
        self,
        model: Transformer,
        capacity: int | None = None,
        computes: torch.dtype | None = None,
    ) -> None:
        shape = model.shape
        weight = model.embed_tokens.weight
        self.model = model
        # what is gathered for a model in training must not be good for reading only
        self.reading = torch.inference_mode if computes is None else torch.no_grad
        self.window = min(shape.positions, capacity or shape.positions)
        self.ids: list[int] = []
        self.caches = [
            KeyValueCache(
                1,
                block.attention.groups,
                self.window,
                shape.head_size,
                dtype=computes or weight.dtype,
                device=weight.device,
            )
            for block in list(model.layers.values())[: shape.num_layers]
            if isinstance(block, Block)
        ]

    def reset(self) -> None:
        """Begin another text."""
        self.ids = []
        for cache in self.caches:
            cache.length = 0

    def read(self, ids: Sequence[int], piece: int = PIECE) -> Tensor:
        """Read on by at least one token, `piece` at a time; the logits of what follows the last,
        (V)."""
        self.ids += ids
        if len(self.ids) > self.window:
            ids = self.ids[-self.window :]
            self.reset()
            self.ids += ids
        device = self.caches[0].k_BGTD.device
        with self.reading():
            for start in range(0, len(ids), piece):
                logits_BSV: Tensor = self.model(
                    torch.tensor([ids[start : start + piece]], device=device), caches=self.caches
                )
            return logits_BSV[0, -1]


@dataclass(frozen=True)
class Continuations:
    """How texts go on.

    Args:
        sampling: how tokens are drawn.
        max_new_tokens: how many at most.
        end: the id that ends a document.
        apart: the model was trained on documents that do not see each other, so that one begins
            without the `end` of the one before.
        computes: what the model computes in, where that is not the type of its weights: it is being
            trained.
    """

    sampling: Sampling
    max_new_tokens: int
    end: int
    apart: bool = False
    computes: torch.dtype | None = None


def continued_text(
    model: Transformer, tokenizer: Tokenizer, prompt: str, asked: Continuations
) -> Generation:
    """What a model, in the state of evaluation, writes after a prompt; after an empty one, from
    the beginning of a document. It ends early at the end of a document."""
    # as prep-data encodes
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [asked.end]
    new = continuation(
        model,
        ids,
        asked.sampling,
        max_new_tokens=asked.max_new_tokens,
        end=asked.end,
        apart=asked.apart,
        computes=asked.computes,
    )
    # Decoded together: a decoder may treat the first token of a text in its own way.
    text = tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]
    return Generation(prompt, prompt + text, len(new))


def continuation(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    end: int,
    apart: bool = False,
    computes: torch.dtype | None = None,
) -> list[int]:
    """Ids that follow `prompt`, up to `end`, which is not among them.

    Args:
        model: in the state of evaluation.
        prompt: at least one id.
        sampling: how tokens are drawn.
        max_new_tokens, end, apart, computes: as of `Continuations`.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    state = DecodingState(model, len(prompt) + max_new_tokens, computes)
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
