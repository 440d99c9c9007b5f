"""Training in float8, put into a model from outside: the products of the blocks' linear layers.

The rest stays in 16 bits. Embedding and head: the loss is most sensitive to them, and a head's
gradient is made with its loss in chunks. Norms, attention's scores and the router are no linear
layers of weights that are large. Experts: their grouped products are one kernel of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trainkit.jobs.schema import Training
from trainkit.ops import float8
from trainkit.train.model.projection import Projection
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.context_group import ContextGroup
from trainkit.train.parallel.tensor_group import TensorGroup
from trainkit.train.parallel.tensor_parallel import ColumnParallel, RowParallel
from trainkit.train.torch_compat import summed


def highest(x: Tensor, group: str) -> Tensor:
    """The highest over a group."""
    return summed(x, group, "max")


def apply(
    module: Transformer, training: Training, tensor: TensorGroup, context: ContextGroup
) -> None:
    """Let a model, or a part of one, compute in float8 where the job says so. Call it after the
    layers are split: each operand's scale is that of all ranks that have a part of it."""
    if training.precision != "fp8":
        return
    ranks = (context.name,) if context.size > 1 else ()
    of_tokens = (*ranks, tensor.name) if tensor.sequence else ranks
    whole = (tensor.name,)
    recipe = partial(float8.Float8Recipe, training.fp8_recipe == "rowwise", highest)
    recipes = {
        Projection: recipe(of_tokens, (), of_tokens),
        ColumnParallel: recipe(ranks, whole, ranks + whole),
        RowParallel: recipe(ranks + whole, whole, ranks),
    }
    products: dict[type, Callable[..., Tensor]] = {
        kind: partial(float8.linear, recipe=of_kind) for kind, of_kind in recipes.items()
    }
    for part in module.layers.modules():
        if isinstance(part, Projection | ColumnParallel | RowParallel):
            part.product = products[type(part)]
