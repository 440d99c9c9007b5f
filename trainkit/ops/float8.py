"""Linear layers whose three products are in float8, by torchao's recipes (0.18, float8/config.py):

tensorwise: one scale a tensor; weights and activations in E4M3, gradients in E5M2.
rowwise: a scale for each row of each operand, a power of two; all in E4M3.

Scales are of the numbers at hand, never of steps before: the highest magnitude becomes the highest
of the format (448 or 57,344). On a CPU the products are emulated: of the same float8 numbers, in
fp32.

Shapes: T tokens, K inputs of a layer, N outputs; M and N rows of operands whose products are
summed over D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-12  # of a highest magnitude: zeros have a scale too
WHOLE = 16  # numbers, which widths of torch._scaled_mm are multiples of


@dataclass(frozen=True)
class Float8Recipe:
    """How the operands of a layer's products are scaled.

    Args:
        rowwise: by rows; else by tensors.
        highest: the highest of a number over the ranks of a group, by the group's name.
        inputs, weight, outputs: names of the groups whose ranks have parts of the layer's input,
            its weight and its result. A scale of a tensor is that of the whole tensor; rows whose
            scales are powers of two round alike without asking.
    """

    rowwise: bool
    highest: Callable[[Tensor, str], Tensor]
    inputs: Sequence[str] = ()
    weight: Sequence[str] = ()
    outputs: Sequence[str] = ()

    def quantized(
        self, x_MD: Tensor, dtype: torch.dtype, groups: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        """Numbers in float8, and what they were multiplied with: fp32, (M, 1) or ()."""
        most = torch.finfo(dtype).max
        if self.rowwise:
            amax = x_MD.abs().amax(-1, keepdim=True)
        else:
            amax = reduce(self.highest, groups, x_MD.abs().amax())
        # in fp64, as torchao: else compiled scales differ from others
        scale = (most / amax.double().clamp(min=LEAST)).float()
        if self.rowwise:
            scale = scale.log2().floor().exp2()
        # torch 2.11 does not saturate
        return (x_MD.float() * scale).clamp(-most, most).to(dtype), scale


def product(a_MD: Tensor, scale_a: Tensor, b_ND: Tensor, scale_b: Tensor, **words: Any) -> Tensor:
    """a @ b.T of float8 numbers, (M, N).

    Args:
        scale_a, scale_b: what they were multiplied with.
        words: `out_dtype`, and of torch._scaled_mm `use_fast_accum`.
    """
    if not a_MD.is_cuda:
        summed = (a_MD.float() / scale_a) @ (b_ND.float() / scale_b).T
        return summed.to(words["out_dtype"])
    rows = len(b_ND)
    odd = -a_MD.shape[1] % WHOLE
    if odd:
        a_MD = F.pad(a_MD, (0, odd))
    if odd or rows % WHOLE:
        b_ND = F.pad(b_ND, (0, odd, 0, -rows % WHOLE))
    factor_a = scale_a.reciprocal()
    factor_b = scale_b.reciprocal()
    by_rows = scale_a.ndim > 0
    one = factor_a.new_ones(())
    # By rows afterwards, which is exact with powers of two: torch's own kernel for rows is slow
    # without fast sums, and not every GPU has one.
    y_MN = torch._scaled_mm(
        a_MD.contiguous(),
        b_ND.contiguous().t(),
        scale_a=one if by_rows else factor_a,
        scale_b=one if by_rows else factor_b,
        **words,
    )[:, :rows]
    return (y_MN * factor_a * factor_b.T).to(y_MN.dtype) if by_rows else y_MN


class _Float8Product(torch.autograd.Function):
    """x @ w.T with both gradients; what is kept for them is not in float8."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.recipe = recipe
        x = recipe.quantized(x_TK, torch.float8_e4m3fn, recipe.inputs)
        w = recipe.quantized(w_NK, torch.float8_e4m3fn, recipe.weight)
        return product(*x, *w, out_dtype=x_TK.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, w_NK = ctx.saved_tensors
        (g_TN,) = upstream
        recipe = ctx.recipe
        of_gradients = torch.float8_e4m3fn if recipe.rowwise else torch.float8_e5m2
        g = recipe.quantized(g_TN, of_gradients, recipe.outputs)
        w = recipe.quantized(w_NK.t(), torch.float8_e4m3fn, recipe.weight)
        dx_TK = product(*g, *w, out_dtype=x_TK.dtype, use_fast_accum=False)
        g = recipe.quantized(g_TN.t(), of_gradients, recipe.outputs)
        x = recipe.quantized(x_TK.t(), torch.float8_e4m3fn, recipe.inputs)
        dw_NK = product(*g, *x, out_dtype=w_NK.dtype, use_fast_accum=False)
        return dx_TK, dw_NK, None


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, recipe: Float8Recipe) -> Tensor:
    """As torch's linear, (..., K) -> (..., N), its products in float8."""
    y_TN = _Float8Product.apply(x.flatten(0, -2), weight_NK, recipe)  # type: ignore[no-untyped-call]
    y: Tensor = y_TN.view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N.to(y.dtype)
