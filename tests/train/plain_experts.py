"""What the plain loop of tests/train/plain_loop.py adds for experts, from definitions: losses of
balance of the routers' logits, loads, and biases that move; and for the families beside them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trainkit.jobs.schema import Job, Model
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.model.attention import Context
from trainkit.train.model.batch import Batch
from trainkit.train.model.frequencies import tables
from trainkit.train.model.router import route
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


@contextlib.contextmanager
def routers_watched(model: Transformer) -> Iterator[dict[int, Tensor]]:
    """The logits (T, E) that each layer's router makes inside, by the layer's number."""
    found: dict[int, Tensor] = {}
    hooks = []
    for number, block in model.layers.items():
        router = getattr(block.mlp, "router", None)
        if router is not None:

            def keep(_: nn.Module, __: Any, logits: Tensor, number: int = int(number)) -> None:
                found[number] = logits

            hooks.append(router.register_forward_hook(keep))
    yield found
    for hook in hooks:
        hook.remove()


def balance(logits_TE: Tensor, job: Job, before_E: Tensor | None) -> Tensor:
    """The mean over micro-batches, or samples, of E sum_e f_e P_e, and of logsumexp^2 over
    tokens, each by its coefficient. `before_E`: loads of the step before, None in the first."""
    moe, routing = job.model.moe, job.model.routing
    assert moe is not None
    scores_TE = logits_TE.sigmoid() if routing.score == "sigmoid" else logits_TE.softmax(-1)
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    samples = 1 if moe.router_load_balancing_type == "seq_aux_loss" else 0
    together = (samples or job.training.micro_batch_size) * job.model.seq_length
    losses = []
    for shares_NE in torch.split(shares_TE, together):
        best = shares_NE.topk(routing.chosen, dim=-1).indices
        counts_E = torch.bincount(best.flatten(), minlength=routing.experts)
        if moe.router_load_balancing_type == "global_aux_loss":
            counts_E = torch.ones(routing.experts) if before_E is None else before_E
        f_E = counts_E / counts_E.sum().to(shares_NE.dtype)
        losses.append(routing.experts * (f_E * shares_NE.mean(0)).sum())
    z = logits_TE.logsumexp(-1).square().mean()
    return moe.aux_loss_coeff * torch.stack(losses).mean() + moe.z_loss_coeff * z


def dropped(experts_TK: Tensor, job: Job) -> int:
    """How many choices of a step are above the capacity of their expert in their sample."""
    moe = job.model.moe
    assert moe is not None
    if moe.expert_capacity_factor is None:
        return 0
    tokens = job.model.seq_length
    capacity = math.ceil(tokens * moe.router_topk / moe.num_experts * moe.expert_capacity_factor)
    samples = experts_TK.view(-1, tokens * moe.router_topk)
    counts = [torch.bincount(sample, minlength=moe.num_experts) for sample in samples]
    return sum(int((each - capacity).clamp(min=0).sum()) for each in counts)


@torch.no_grad()
def move_biases(model: Transformer, routers: dict[int, Tensor], job: Job) -> NDArray[Any]:
    """Move the biases by the choices of a step; returns these and how many were dropped, layer
    after layer."""
    moe, routing = job.model.moe, job.model.routing
    assert moe is not None
    found = torch.zeros(job.model.blocks, routing.experts + 1, dtype=torch.float64)
    for number, logits_TE in routers.items():
        block: Any = model.layers[str(number)]
        bias_E = block.mlp.router.expert_bias
        chosen_TK = route(logits_TE, bias_E, routing).experts_TK
        loads_E = torch.bincount(chosen_TK.flatten(), minlength=routing.experts).double()
        found[number, :-1], found[number, -1] = loads_E, dropped(chosen_TK, job)
        if bias_E is not None:
            bias_E += moe.router_bias_update_rate * (loads_E.mean() - loads_E).sign()
    return np.array(found.flatten())
