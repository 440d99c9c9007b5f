"""One case an operation and direction: what a kernel is given, what it must return, and what it may
move. The interpreter runs them small, a GPU at any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.ops import (
    adamw as adamw_op,
    cross_entropy as loss_op,
    gelu as gelu_op,
    layer_norm as layer_norm_op,
    rms_norm as rms_norm_op,
    rotary as rotary_op,
    scaled_softmax as softmax_op,
    swiglu as swiglu_op,
)
from trainkit.ops.triton_kernels import (
    activations,
    adamw,
    cross_entropy,
    norms,
    rotary,
    scaled_softmax,
)

EPS = 1e-5
# of an output's largest number: half a unit of the last place, and in 16 bits as much again for
# what was rounded on the way
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
APPROXIMATE = ("tanh", "none")


@dataclass(frozen=True)
class Case:
    """A kernel's work.

    Args:
        name: of the operation.
        run: launches it; to be called once, for some write in place.
        wanted: what it must return, computed in fp64.
        moved: bytes as `bytes_moved` has them, and those of the same operation that it does not
            count: what is as small as a row or a column, and not as a matrix.
        streams: tensors that a kernel reads a whole number of times, and how often.
        besides: by output, how much farther off a number may be than the bound of its dtype: where
            large terms cancel, the bound of the sum's dtype, of the largest term; where a number
            is rounded to the dtype on the way, one unit of the largest such number, for from fp32
            it may be rounded to the neighbour of what it is rounded to from fp64. Outputs that
            have none here: 0.
    """

    name: str
    run: Callable[[], Tensor | tuple[Tensor, ...]]
    wanted: tuple[Tensor, ...]
    moved: int
    streams: tuple[tuple[Tensor, int], ...]
    besides: tuple[float, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Random tensors of a dtype on a device."""

    dtype: torch.dtype
    device: str
    generator: torch.Generator

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return numbers.to(self.device, dtype or self.dtype)

    @property
    def wide(self) -> torch.dtype:
        """What statistics are in."""
        return torch.promote_types(self.dtype, torch.float32)


def inputs(dtype: torch.dtype, device: str) -> Inputs:
    """The same numbers each time."""
    return Inputs(dtype, device, torch.Generator().manual_seed(1))


def _gradients(
    function: Callable[..., Tensor], given: tuple[Tensor, ...], upstream: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(result, gradients of what is given), by autograd in fp64."""
    wide = [x.detach().double().requires_grad_() for x in given]
    result = function(*wide)
    return result.detach(), torch.autograd.grad(result, wide, upstream.double())


def norm_cases(made: Inputs, rows: int, width: int, times: tuple[int, int]) -> Iterator[Case]:
    """`times`: how often a row is read by forward and by backward."""
    for kind, operation in (("rms_norm", rms_norm_op), ("layer_norm", layer_norm_op)):
        x, residual, dy, dsum = (made.new(rows, width) for _ in range(4))
        weights = tuple(made.new(width) for _ in range(1 if kind == "rms_norm" else 2))
        for added in (False, True):
            name = f"add_{kind}" if added else kind
            given = (x, residual) if added else (x,)
            total = x + residual if added else x
            y, (dx, *dweights) = _gradients(
                lambda t, *w, o=operation: o.reference(t, *w, EPS), (total, *weights), dy
            )
            mean = total.double().mean(-1)
            if kind == "rms_norm":
                mean = torch.zeros_like(mean)
            rstd = ((total.double() - mean[:, None]).square().mean(-1) + EPS).rsqrt()
            statistics = (rstd,) if kind == "rms_norm" else (mean, rstd)
            saved = tuple(t.to(made.wide) for t in statistics)
            # dx = rstd (dy w - ...): with few channels most of it cancels
            term = (rstd[:, None] * dy.double() * weights[0].double()).abs().max()
            moved = partial(operation.bytes_moved, (rows, width), made.dtype, made.dtype)
            yield Case(
                name,
                partial(getattr(norms, name), *given, *weights, EPS),
                (y, *((total,) if added else ()), *statistics),
                moved(added=added),
                tuple((t, times[0]) for t in given),
            )
            yield Case(
                f"{name}_backward",
                partial(
                    getattr(norms, f"{name}_backward"),
                    *((dy, dsum) if added else (dy,)), total, weights[0], *saved,
                ),
                (dx + dsum.double() if added else dx, *dweights),
                moved(added=added, backward=True),
                ((dy, times[1]), (total, times[1])),
                (BOUNDS[made.wide] * float(term),),
            )  # fmt: skip


def _with_form(function: Callable[..., Tensor], form: str, *given: Tensor) -> Tensor:
    return function(*given, form)


def activation_cases(made: Inputs, rows: int, width: int) -> Iterator[Case]:
    """Widths are those of results."""
    gate_up = made.new(rows, 2 * width)
    x, dy = made.new(rows, width), made.new(rows, width)
    bias = made.new(width)
    forms = [("swiglu", ()), *(("geglu", (form,)) for form in APPROXIMATE)]
    for name, form in forms:
        reference = swiglu_op.geglu_reference if form else swiglu_op.reference
        h, gradients = _gradients(lambda t, r=reference, f=form: r(t, *f), (gate_up,), dy)
        moved = partial(swiglu_op.bytes_moved, gate_up.shape, made.dtype)
        kernel = getattr(activations, name)
        backward = getattr(activations, f"{name}_backward")
        once = ((gate_up, 1),)
        yield Case(name, partial(kernel, gate_up, *form), (h,), moved(), once)
        yield Case(
            f"{name}_backward",
            partial(backward, dy, gate_up, *form),
            gradients,
            moved(backward=True),
            (*once, (dy, 1)),
        )
    for approximate in APPROXIMATE:
        for name, given in (("gelu", (x,)), ("bias_gelu", (x, bias))):
            plain = gelu_op.bias_reference if len(given) > 1 else gelu_op.reference
            y, gradients = _gradients(partial(_with_form, plain, approximate), given, dy)
            dtype = made.dtype if len(given) > 1 else None
            moved = partial(gelu_op.bytes_moved, x.shape, made.dtype, dtype)
            kernel = getattr(activations, name)
            backward = getattr(activations, f"{name}_backward")
            yield Case(name, partial(kernel, *given, approximate), (y,), moved(), ((x, 1),))
            yield Case(
                f"{name}_backward",
                partial(backward, dy, *given, approximate),
                gradients,
                moved(backward=True),
                ((x, 1), (dy, 1)),
            )


def rotary_cases(made: Inputs, tokens: int, size: int, turning: int) -> Iterator[Case]:
    """Grouped queries, one table for all samples and one each."""
    heads, groups = 4, 2
    qkv = made.new(2, tokens, (heads + 2 * groups) * size)
    for samples in ((), (2,)):
        half = made.new(*samples, tokens, turning // 2, dtype=made.wide)
        angles = torch.cat([half, half], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        parts = rotary_op.reference(qkv.double(), cos.double(), sin.double(), heads, groups)
        back = rotary_op.reference(qkv.double(), cos.double(), -sin.double(), heads, groups)
        q, k, v = (part.contiguous() for part in rotary_op.split(qkv, heads, groups))
        moved = rotary_op.bytes_moved(qkv.shape, made.dtype, cos.shape)
        run = partial(rotary.rotate_qkv, qkv, cos, sin, heads, groups)
        yield Case("rotate_qkv", run, parts, moved, ((qkv, 1),))
        yield Case(
            "rotate_qkv_backward",
            partial(rotary.rotate_qkv_backward, q, k, v, cos, sin),
            (torch.cat([part.flatten(2) for part in back], dim=-1),),
            moved,
            ((q, 1), (k, 1), (v, 1)),
        )
        yield from _normed_cases(qkv, made.new(2, size), (cos, sin), (heads, groups), (q, k, v))


class _Rounded(torch.autograd.Function):
    """fp64 rounded to a dtype, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype).double(), None


def _normed_cases(
    qkv: Tensor,
    weights: Tensor,
    tables: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    upstream: tuple[Tensor, Tensor, Tensor],
) -> Iterator[Case]:
    """Both directions of heads that are normed, rounded and turned."""
    leaves = [t.double().requires_grad_() for t in (qkv, weights)]
    cos, sin = (t.double() for t in tables)
    q, k, v = rotary_op.split(leaves[0], *heads)
    normed = [
        _Rounded.apply(rms_norm_op.reference(x, weight, EPS), qkv.dtype)  # type: ignore[no-untyped-call]
        for x, weight in zip((q, k), leaves[1], strict=True)
    ]
    parts = (*(rotary_op.rotate(x, cos, sin) for x in normed), v)
    gradients = torch.autograd.grad(parts, leaves, [t.double() for t in upstream])
    size = qkv.shape[-1] // (heads[0] + 2 * heads[1])
    of_weights = 2 * size * weights.dtype.itemsize
    moved = rotary_op.bytes_moved(qkv.shape, qkv.dtype, tables[0].shape) + of_weights
    normed_once_more = math.prod(qkv.shape[:-1]) * sum(heads) * size * qkv.dtype.itemsize
    yield Case(
        "norm_rotate_qkv",
        partial(rotary.norm_rotate_qkv, qkv, weights, *tables, *heads, EPS),
        tuple(part.detach() for part in parts),
        moved,
        ((qkv, 1),),
        tuple(torch.finfo(qkv.dtype).eps * float(x.detach().abs().max()) for x in normed),
    )
    yield Case(
        "norm_rotate_qkv_backward",
        partial(rotary.norm_rotate_qkv_backward, *upstream, qkv, weights, *tables, EPS),
        gradients,
        moved + normed_once_more + of_weights,
        tuple((t, 1) for t in upstream),
    )


def loss_cases(made: Inputs, rows: int, vocab: int, columns: int) -> Iterator[Case]:
    """One token without a label, a padded vocabulary, a vocabulary that lies elsewhere too."""
    logits = made.new(rows, columns)
    labels = torch.arange(rows, device=made.device) * 7 % vocab
    labels[rows // 2] = loss_op.NO_LABEL
    scale = torch.tensor(0.25, dtype=made.wide, device=made.device)
    wide = logits.double()
    wide_scale = scale.double()
    row = made.wide.itemsize * rows
    floor = loss_op.bytes_moved(rows, columns, made.dtype)
    gradient, entropy = loss_op.plain(wide.clone(), labels, vocab, 0.01, wide_scale, True)

    def learn() -> tuple[Tensor, ...]:
        return cross_entropy.softmax_loss_(mine, labels, vocab, 0.01, scale, True), mine

    mine = logits.clone()
    # beside the floor: the losses of rows, and the scale
    small = row + scale.itemsize
    yield Case("softmax_loss_", learn, (entropy, gradient), floor + small, ((mine, 2),))
    yield Case(
        "softmax_loss_ without a gradient",
        partial(cross_entropy.softmax_loss_, logits, labels, vocab, 0.01, scale, False),
        (entropy,),
        floor - logits.nbytes + row,
        ((logits, 1),),
    )
    elsewhere = torch.where(labels % 2 == 0, labels, vocab + 3)
    found = loss_op.statistics_reference(wide, elsewhere, vocab)
    yield Case(
        "softmax_statistics",
        partial(cross_entropy.softmax_statistics, logits, elsewhere, vocab),
        (found,),
        floor - logits.nbytes + 3 * row,
        ((logits, 1),),
    )
    numbers = tuple(t.to(made.wide) for t in (found[0], 1 / found[1], found[1] / 9))
    whole = [t.double() for t in numbers]

    def differentiate() -> tuple[Tensor, ...]:
        cross_entropy.softmax_gradient_(other, elsewhere, vocab, *numbers)
        return (other,)

    other = logits.clone()
    expected = loss_op.gradient_reference(wide.clone(), elsewhere, vocab, *whole)
    yield Case("softmax_gradient_", differentiate, (expected,), floor + 3 * row, ((other, 1),))


def optimizer_cases(made: Inputs, sizes: tuple[int, ...]) -> Iterator[Case]:
    """Weights in fp32 or wider, gradients in the dtype, copies in bf16."""
    gradients = [made.new(size) for size in sizes]
    elements = sum(sizes)
    sums = [g.double().square().sum() for g in gradients]
    pieces = sum(-(-size // adamw.PIECE) for size in sizes)
    # a piece's line of the table, an address a tensor, a partial sum a piece
    tables = pieces * 24 + len(sizes) * 8
    yield Case(
        "squared_norm",
        lambda: (adamw.squared_norm(gradients),),
        (torch.stack(sums).sum(),),
        elements * made.dtype.itemsize + tables + pieces * 8,
        tuple((g, 1) for g in gradients),
    )
    weights, averages = ([made.new(size, dtype=made.wide) for size in sizes] for _ in range(2))
    squares = [made.new(size, dtype=made.wide).square() for size in sizes]
    decays = [0.1 * (i % 2) for i in range(len(sizes))]
    rule = adamw_op.Rule(0.9, 0.95, 1e-8)
    for copied in (False, True):
        mine, own = (
            [[t.to(dtype, copy=True) for t in kind] for kind in (weights, averages, squares)]
            for dtype in (made.wide, torch.float64)
        )
        copies = [torch.zeros_like(w, dtype=torch.bfloat16) for w in weights if copied]
        numbers = [torch.tensor(n, device=made.device) for n in (2, 1e-2, 2.5, 0.0)]
        steps, rate, divisor, skip = numbers
        on = adamw_op.Weights(own[0], [g.double() for g in gradients], own[1], own[2], [], decays)
        adamw_op.reference(on, rule, steps=steps, rate=rate, divisor=divisor, skip=skip)

        def update(mine: Any = mine, copies: Any = copies, numbers: Any = numbers) -> Any:
            adamw.adamw_step_(
                mine[0], gradients, mine[1], mine[2], copies, numbers[0], numbers[1],
                rule.beta1, rule.beta2, rule.eps, decays, numbers[2], numbers[3],
            )  # fmt: skip
            return (*mine[0], *mine[1], *mine[2], *copies)

        copy = torch.bfloat16 if copied else None
        # besides the tables: four addresses more a tensor, its decay, and the step's numbers
        small = tables + len(sizes) * (4 * 8 + 8) + sum(n.itemsize for n in numbers)
        yield Case(
            "adamw_step_",
            update,
            (*own[0], *own[1], *own[2], *(own[0] if copied else ())),
            adamw_op.bytes_moved(elements, made.wide, made.dtype, copy) + small,
            tuple((t, 1) for t in (*gradients, *mine[0], *mine[1], *mine[2])),
        )


def softmax_cases(made: Inputs, queries: int, keys: int) -> Iterator[Case]:
    """Causal, and under a mask that heads share; the first row of it sees nothing."""
    x = made.new(2, 3, queries, keys)
    dy = made.new(2, 3, queries, keys)
    mask = made.new(2, 1, queries, keys) > 0
    mask[0, 0, 0] = True
    causal = (x.double(), 0.7)
    for name, given, wanted, shape in (
        ("scaled_causal_softmax", (x, 0.7), softmax_op.causal_reference(*causal), None),
        (
            "scaled_masked_softmax",
            (x, mask, 0.7),
            softmax_op.reference(x.double(), mask, 0.7),
            mask.shape,
        ),
    ):
        moved = softmax_op.bytes_moved(x.shape, made.dtype, shape)
        yield Case(name, partial(getattr(scaled_softmax, name), *given), (wanted,), moved, ())
    y = softmax_op.causal_reference(*causal).to(made.dtype)
    wide = y.double()
    dx = 0.7 * wide * (dy.double() - (wide * dy.double()).sum(-1, keepdim=True))
    yield Case(
        "scaled_softmax_backward",
        partial(scaled_softmax.scaled_softmax_backward, dy, y, 0.7),
        (dx,),
        softmax_op.bytes_moved(x.shape, made.dtype, backward=True),
        ((dy, 2), (y, 2)),
    )


def outputs(case: Case) -> tuple[Tensor, ...]:
    """What the case's kernel returns."""
    found = case.run()
    return (found,) if isinstance(found, Tensor) else found


def check_numbers(case: Case, dtype: torch.dtype, found: tuple[Tensor, ...]) -> None:
    """Every output within the bound of its dtype, or of the inputs' where it is wider, and what its
    case has besides."""
    assert len(found) == len(case.wanted), case.name
    besides = case.besides + (0.0,) * len(found)
    for number, (got, wanted) in enumerate(zip(found, case.wanted, strict=True)):
        assert got.shape == wanted.shape, (case.name, number, got.shape, wanted.shape)
        bound = max(BOUNDS[got.dtype], BOUNDS[torch.promote_types(dtype, torch.float32)])
        error = (got.double() - wanted).abs().max()
        allowed = bound * max(1.0, float(wanted.abs().max())) + besides[number]
        assert error <= allowed, (case.name, number, error)
