"""Where operations are declared to torch.

A file of an operation declares its schema, what it returns on the meta device and its gradient;
that is Python, and cheap. What computes it is loaded by trainkit/ops/kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "trainkit"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def declare(schema: str, fake: Callable[..., Any]) -> Any:
    """Declare an operation; returns what calls it.

    Args:
        schema: as of torch.library.define: "rms_norm(Tensor x, ...) -> (Tensor, Tensor)".
        fake: of the same parameters: tensors of the shapes, dtypes and strides of the results.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def implement(operation: Any, function: Callable[..., Any]) -> None:
    """Compute an operation by Python, on every device.

    Args:
        operation: as of `declare`.
        function: of the same parameters.
    """
    LIBRARY.impl(operation.default, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def differentiate(
    operation: Any, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Give an operation its gradient.

    Args:
        operation: as of `declare`.
        backward: (ctx, *gradients of the results) -> a gradient, or None, of every parameter.
        setup_context: (ctx, inputs, output) -> None; saves what backward needs.
    """
    torch.library.register_autograd(
        str(operation.default).removesuffix(".default").replace(".", "::"),
        backward,
        setup_context=setup_context,
        lib=LIBRARY,
    )


def packed_like(x: Tensor) -> Tensor:
    """On the meta device: what holds a result of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def row_statistics(x: Tensor) -> Tensor:
    """On the meta device: a number a row of x, in the precision of sums."""
    rows = math.prod(x.shape[:-1]) if x.dim() else 1
    return x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))
