"""Sizes that are best for a budget, by parabolas of the loss over log N at equal FLOPs (Hoffmann et
al., arXiv:2203.15556, approach 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.scaling.law import DRAWS, Floats, interval
from trainkit.scaling.points import ScalingPoint

SAME = 1.1  # FLOPs up to so many times the least are one budget
SIZES = 4  # of a budget: three numbers are fitted
NEEDS = f"approach 2 needs two budgets (FLOPs within {SAME - 1:.0%}) with {SIZES} sizes each"


@dataclass(frozen=True)
class Parabola(Record):
    """The minimum of one budget.

    Args:
        flops: the budget.
        parameters: N with the least loss.
        tokens: D of that model.
        loss: the least loss.
    """

    flops: float
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class IsoFlops(Record):
    """N is proportional to C^a, D to C^b, by the minima of parabolas.

    Args:
        parabolas: a budget each.
        a: exponent of N, with `a_interval`.
        b: exponent of D, with `b_interval`.
    """

    parabolas: tuple[Parabola, ...]
    a: float
    a_interval: tuple[float, float]
    b: float
    b_interval: tuple[float, float]


def fit_isoflops(points: Sequence[ScalingPoint], seed: int = 0) -> IsoFlops | None:
    """Fit what there is; None where the runs are not of equal budgets (NEEDS).

    Raises ConfigError (exit 3) where the least loss of a budget is not between its sizes.
    """
    groups = _budgets(points)
    if len(groups) < 2:
        return None
    source = np.random.default_rng(seed)
    found = [_minima(group, source) for group in groups]
    budgets = np.log([np.mean([point.flops for point in group]) for group in groups])
    least = np.stack([minima for minima, _ in found])  # (budgets, 2, 1 + DRAWS): log N, log D
    slopes = np.stack([np.polyfit(budgets, least[:, kind], 1)[0] for kind in (0, 1)])
    parabolas = tuple(
        Parabola(float(np.exp(c)), float(np.exp(n)), float(np.exp(d)), loss)
        for c, (n, d), (_, loss) in zip(budgets, least[:, :, 0], found, strict=True)
    )
    (a, *a_draws), (b, *b_draws) = slopes.tolist()
    return IsoFlops(parabolas, a, interval(a_draws), b, interval(b_draws))


def _budgets(points: Sequence[ScalingPoint]) -> list[list[ScalingPoint]]:
    groups: list[list[ScalingPoint]] = []
    for point in sorted(points, key=lambda point: point.flops):
        if not groups or point.flops > SAME * groups[-1][0].flops:
            groups.append([])
        groups[-1].append(point)
    return [group for group in groups if len({point.parameters for point in group}) >= SIZES]


def _minima(group: Sequence[ScalingPoint], source: np.random.Generator) -> tuple[Floats, float]:
    """(log N, log D) of the minimum, and of those of runs drawn again; the least loss. Draws
    without a minimum between the sizes have the nearest of these."""
    sizes, tokens = (
        np.log([getattr(point, key) for point in group]) for key in ("parameters", "tokens")
    )
    losses = np.array([point.loss for point in group])
    middle = sizes.mean()
    curve = np.polyfit(sizes - middle, losses, 2)
    fitted = np.polyval(curve, sizes - middle)
    wider = (losses - fitted) * np.sqrt(len(group) / max(1, len(group) - 3))
    again = fitted[:, None] + source.choice(wider, (len(group), DRAWS))
    bend, slope, _ = np.polyfit(sizes - middle, np.column_stack([losses, again]), 2)
    inside = -slope / (2 * np.where(bend > 0, bend, np.nan)) + middle
    if not sizes.min() < inside[0] < sizes.max():
        few, many = np.exp([sizes.min(), sizes.max()])
        lower = group[int(np.argmin(losses))].parameters
        raise ConfigError(
            f"at {group[0].flops:.3g} FLOPs the loss has no least between the sizes {few:,.0f} and"
            f" {many:,.0f}: it is lowest at {lower:,}, the edge",
            hint="train smaller or larger models for this budget, or leave its runs out",
        )
    edge = np.where(slope > 0, sizes.min(), sizes.max())
    best = np.clip(np.where(np.isnan(inside), edge, inside), sizes.min(), sizes.max())
    by_size = np.polyfit(sizes, tokens, 1)
    return np.stack([best, np.polyval(by_size, best)]), float(np.polyval(curve, best[0] - middle))
