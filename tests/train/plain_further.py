"""What the plain loop of tests/train/plain_loop.py adds for a model that predicts one token more,
from the definition (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2), document by document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.jobs.schema import Model
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.model.attention import Context
from trainkit.train.model.batch import Batch
from trainkit.train.model.frequencies import tables
from trainkit.train.model.transformer import Transformer


@contextlib.contextmanager
def last_norm_watched(model: Transformer) -> Iterator[list[Tensor]]:
    """What the model's last norm makes inside."""
    found: list[Tensor] = []
    hook = model.final_norm.register_forward_hook(lambda _, __, made: found.append(made))
    yield found
    hook.remove()


def documents_of(batch: Batch) -> list[range]:
    """Tokens of all samples, one after another, by what may not see or follow each other."""
    samples, length = batch.tokens_BS.shape
    starts = {sample * length for sample in range(samples)}
    if batch.documents is not None:
        starts |= {*batch.documents.bounds[:-1]}
    if batch.positions_BS is not None:
        positions = batch.positions_BS.flatten().tolist()
        starts |= {token for token, position in enumerate(positions) if position == 0}
    ends = [*sorted(starts), samples * length]
    return [range(start, stop) for start, stop in pairwise(ends)]


def further_entropies(model: Transformer, made_BSH: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy (N) of the token after the next one of those that have one."""
    shape: Model = model.shape
    mtp: Any = model.mtp
    tokens, labels = batch.tokens_BS.flatten().tolist(), batch.labels_BS.flatten().tolist()
    following = [0] * len(tokens)
    wanted = [NO_LABEL] * len(tokens)
    for document in documents_of(batch):
        for token in document[:-1]:
            following[token] = tokens[token + 1]
            wanted[token] = labels[token + 1]

    def norm(x_BSH: Tensor, weight: Tensor) -> Tensor:
        scale = (x_BSH.square().mean(-1, keepdim=True) + shape.layernorm_epsilon).rsqrt()
        return x_BSH * scale * weight

    next_BSH = model.embed_tokens.weight[torch.tensor(following)].view(made_BSH.shape)
    both = torch.cat([norm(next_BSH, mtp.enorm.weight), norm(made_BSH, mtp.hnorm.weight)], -1)
    positions_BS = batch.positions_BS
    if positions_BS is None:
        positions_BS = torch.arange(batch.tokens_BS.shape[1])
    rotary = tables(shape, positions_BS, made_BSH.dtype)
    context = Context(rotary, None, batch.documents, None, None)
    x_BSH = model.layers[str(shape.num_layers)](both @ mtp.eh_proj.weight.T, context)
    head = model.embed_tokens if model.head is None else model.head
    logits_BSV = norm(x_BSH, mtp.final_norm.weight) @ head.weight.T
    wanted_N = torch.tensor(wanted)
    entropy_N = F.cross_entropy(logits_BSV.flatten(0, 1), wanted_N, reduction="none")
    return entropy_N[wanted_N != NO_LABEL]
