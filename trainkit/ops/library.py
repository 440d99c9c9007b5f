"""Where operations are declared to torch, and where what computes them is loaded.

A file of an operation declares its schema, what it returns on the meta device and its gradient;
that is Python, and cheap. What computes it comes from elsewhere, once a process: for CPUs the
library that `invoke build` compiles from csrc/kernels, for CUDA devices the Triton kernels.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainkit.base.errors import Exit, TrainkitError
from trainkit.ops.build import LIBRARY_FILE, why_unusable

NAMESPACE = "trainkit"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_lock = threading.Lock()


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


class Unavailable(TrainkitError):
    """There are no fused operations for a kind of device; the message says why, the hint how to
    get them."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why, exit=Exit.STAGE_STALE, hint=hint)


def load(device_type: str) -> None:
    """Make the operations work on devices of a type: "cpu" or "cuda". The first call of a process
    does the work. Raises Unavailable."""
    with _lock:
        _load(device_type)


@cache
def _load(device_type: str) -> None:
    if device_type == "cpu":
        if why := why_unusable(LIBRARY_FILE, torch.__version__):
            raise Unavailable(why, "compile them: ./inv build")
        try:
            torch.ops.load_library(str(LIBRARY_FILE))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise Unavailable(
                f"{LIBRARY_FILE} cannot be loaded: {error}", "compile it again: ./inv build --force"
            ) from None
    elif device_type == "cuda":
        try:
            # by its name: it imports the files of operations, which import this one
            registry = importlib.import_module("trainkit.ops.triton_kernels.register")
        except ModuleNotFoundError as error:
            raise Unavailable(
                f"fused operations for GPUs need {error.name}, which is not installed",
                "it comes with CUDA builds of torch: install one",
            ) from None
        registry.register()
    else:
        raise Unavailable(
            f"there are no fused operations for devices of type {device_type!r}",
            "kernels = 'reference' runs on all of them",
        )
