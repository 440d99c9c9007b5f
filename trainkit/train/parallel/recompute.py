"""Recomputation and compilation, put around the blocks from outside.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainkit.jobs.schema import Model, Training
from trainkit.ops import causal_attention, cross_entropy, sink_attention
from trainkit.train.model.attention import Context
from trainkit.train.model.experts import Dispatched, MixtureOfExperts
from trainkit.train.model.transformer import Block, Transformer
from trainkit.train.parallel import ring_attention
from trainkit.train.ready_graphs import ReadyGraphs
from trainkit.train.torch_compat import group_operations, varlen_operations

Mode = Literal["none", "full", "selective"]


def kept_operations() -> list[Any]:
    """What selective recomputation does not do again: matrix products, attention kernels and
    sums over ranks. All the rest is cheap and is done twice."""
    aten = torch.ops.aten
    products = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
    ]
    attention = [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        causal_attention.forward.default,
        sink_attention.forward.default,
        ring_attention.forward.default,
    ]
    return [*products, *attention, *varlen_operations(), *group_operations()]


def _policy(
    kept: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operation in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def run_block(block: Block, mode: Mode, random: bool, x_BSH: Tensor, context: Context) -> Tensor:
    """One block. A function of the module, not a closure for each block: compiled once, it
    serves all blocks with one graph.

    Args:
        block: the block.
        mode: what of its activations is computed again in backward.
        random: it drops out, so the second computation must draw the same numbers.
        x_BSH: the residual stream.
        context: what every block gets.
    """
    forward = type(block).forward
    if mode == "none" or not torch.is_grad_enabled():
        return forward(block, x_BSH, context)
    y_BSH: Tensor
    if mode == "full":
        y_BSH = checkpoint(
            forward, block, x_BSH, context, use_reentrant=False, preserve_rng_state=random
        )
    elif mode == "selective":
        y_BSH = checkpoint(
            forward,
            block,
            x_BSH,
            context,
            use_reentrant=False,
            preserve_rng_state=random,
            context_fn=partial(
                create_selective_checkpoint_contexts, partial(_policy, frozenset(kept_operations()))
            ),
        )
    else:
        assert_never(mode)
    return y_BSH


def run_attended(block: Block, x_BSH: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """What stands before a block's experts; one graph for all blocks, as of `run_block`."""
    return type(block).attended(block, x_BSH, context)


def run_dispatched(experts: MixtureOfExperts, x_BSH: Tensor, learns: bool) -> Dispatched:
    """Routing, and tokens on their way to experts."""
    return type(experts).dispatched(experts, x_BSH, learns)


def run_combined(experts: MixtureOfExperts, y_RH: Tensor, sent: Dispatched) -> Tensor:
    """What experts made, by token."""
    return type(experts).combined(experts, y_RH, sent)


def _compile_around_experts(block: Block, graphs: ReadyGraphs) -> None:
    """Compile a block but for its experts: how many rows one has is known when they are there."""
    experts = block.mlp
    assert isinstance(experts, MixtureOfExperts)
    block.attended = partial(graphs.compile(run_attended), block)  # type: ignore[method-assign]
    for name, function in (("dispatched", run_dispatched), ("combined", run_combined)):
        setattr(experts, name, partial(graphs.compile(function), experts))


def wrap_blocks(
    module: Transformer, model: Model, training: Training, graphs: ReadyGraphs | None = None
) -> None:
    """Make every block recompute and compile as `training` asks, and the loss compile with them.
    Call it before fully_shard. Names of parameters stay as they are.

    Args:
        module: the model, or a chunk of it.
        model: its shape.
        training: the job's.
        graphs: those compiled before; None: there are none.
    """
    if training.recompute_granularity == "none" and not training.compile:
        return
    graphs = graphs or ReadyGraphs()
    whole: Callable[..., Tensor] = graphs.compile(run_block) if training.compile else run_block
    # a kernel is one already; split over ranks, it talks to them in between
    if training.compile and module.softmax_loss is cross_entropy.reference:
        module.softmax_loss = cross_entropy.in_blocks(graphs.compile(cross_entropy.plain))
    random = model.hidden_dropout > 0 or model.attention_dropout > 0
    for block in module.layers.values():
        assert isinstance(block, Block)
        mode: Mode = "none"
        if block.number % training.recompute_every == 0:
            mode = training.recompute_granularity
        run = run_block if block.sparse else whole
        block.forward = partial(run, block, mode, random)  # type: ignore[method-assign]
        if block.sparse and training.compile:
            _compile_around_experts(block, graphs)
