"""Whether a compiled function computes what the function computes: both are run on the arguments
at hand, and results and gradients are compared.

What is wrong with a graph that was made for another machine is not rounding: elements are missing,
or others are in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# of the norm of a result or gradient. A kernel rounds once where the function rounds after each
# operation, and adds up in another order
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
TOLERANCE_16_BITS = 0.1
LEAST = 1e-2  # of the largest gradient's norm: what cancels to less is rounding
RATIO = 2.0  # of norms that stay apart by chance where numbers are drawn: dropout
GRADIENT = "gradient"
Function = Callable[..., Any]


def difference(function: Function, compiled: Function, args: Sequence[Any]) -> str:
    """In what the two differ, in words; "" where they agree. The arguments stay as they are, and
    so do the generators of random numbers. A function that draws some is compared by norms alone.

    Args:
        function: takes tensors, modules whose parameters it reads, and values.
        compiled: what was made of it.
        args: of both. Parameters get no gradient.
    """
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    devices = {each.device for each in tensors if each.is_cuda}
    with torch.random.fork_rng(devices):
        before = _generators(devices)
        expected = _outcome(function, args)
        draws = not all(map(torch.equal, before, _generators(devices)))
        found = _outcome(compiled, args)
    largest = max((_norm(each) for name, each in expected if name == GRADIENT), default=0.0)
    for (name, wanted), (_, got) in zip(expected, found, strict=True):
        least = LEAST * float(largest) if name == GRADIENT else 0.0
        if why := _compare(wanted, got, least, draws=draws):
            return f"its {name} {why}"
    return ""


def _generators(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _outcome(function: Function, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """What it returns, and the gradients of what it was given."""
    own = [_copied(value) if type(value) is Tensor else value for value in args]
    results = [each for each in tree_leaves(function(*own)) if isinstance(each, Tensor)]
    outcome = [("result", each.detach()) for each in results]
    roots = [each for each in results if each.requires_grad]
    if roots:
        modules = [value for value in own if isinstance(value, nn.Module)]
        held = [each for module in modules for each in module.parameters()]
        given = [each for each in (*own, *held) if isinstance(each, Tensor) and each.requires_grad]
        # of the size of the result, whatever that is: gradients of 16 bits stay in their range
        upstream = [(each / _norm(each).clamp_min(1e-30)).to(each.dtype).detach() for each in roots]
        gradients = torch.autograd.grad(roots, given, upstream, materialize_grads=True)
        outcome += [(GRADIENT, each) for each in gradients]
    return outcome


def _copied(x: Tensor) -> Tensor:
    """A leaf of the same strides: the function may write into it."""
    elements = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    copy = x.detach().as_strided((elements,), (1,)).clone().as_strided(x.shape, x.stride())
    return copy.requires_grad_(x.requires_grad)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _compare(wanted: Tensor, got: Tensor, least: float, *, draws: bool) -> str:
    """How far the two are apart, in words; "" for what the function itself makes not finite: then
    it is the arguments that are wrong."""
    size = float(_norm(wanted))
    if not math.isfinite(size):
        return ""
    large = max(size, least)
    if draws:
        found = max(float(_norm(got)), least)
        near = large <= RATIO * found <= RATIO**2 * large
        return "" if near else f"has norm {found:.3g} instead of about {size:.3g}"
    error = float(_norm(got.double() - wanted.double()))
    near = error <= TOLERANCE.get(wanted.dtype, TOLERANCE_16_BITS) * large
    return "" if near else f"is off by {error:.3g} at a norm of {size:.3g}"
