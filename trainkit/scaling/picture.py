"""Loss against cost as a picture, by matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.runs.summary import FORMATS
from trainkit.scaling.law import Floats, interval
from trainkit.scaling.points import ScalingPoint
from trainkit.scaling.report import WIDEST, Prediction, ScalingLaw

MARGIN = 1.04  # of losses, to the edge

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def refuse_picture(path: Path) -> None:
    """Raises ConfigError (exit 3) for an ending that is not drawn."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(FORMATS)}")


def draw_law(
    fitted: ScalingLaw,
    path: Path,
    predicted: Sequence[tuple[float, Prediction]] = (),
    later: Sequence[ScalingPoint] = (),
) -> None:
    """Draw the runs, the law over the tokens of each size, the least loss of each budget with its
    interval, and what is extrapolated, dashed.

    Args:
        fitted: the law with its runs.
        path: a file of one of FORMATS.
        predicted: (FLOPs, loss) of sizes that were not measured.
        later: runs that the law has not seen.

    Raises:
        ConfigError: another ending, or matplotlib is not installed (exit 3).
    """
    refuse_picture(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    with rc_context({"svg.hashsalt": "scaling-law", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(7, 4.6), layout="constrained")
        axes = figure.subplots()
        _draw_sizes(axes, fitted)
        _draw_frontier(axes, fitted, [flops for flops, _ in predicted])
        for number, (flops, each) in enumerate(predicted):
            around = [[each.loss - each.low], [each.high - each.loss]]
            _draw_predicted(axes, fitted, flops, each)
            label = None if number else f"predicted, {fitted.confidence:.0%} interval"
            axes.errorbar(
                [flops], [each.loss], around, fmt="D", mfc="white", color="black", label=label
            )
        if later:
            of_later = [[point.flops for point in later], [point.loss for point in later]]
            axes.plot(*of_later, "*", color="#d55e00", markersize=11, label="measured afterwards")
        axes.set_xscale("log")
        losses = [point.loss for point in (*fitted.points, *later)]
        losses += [end for _, each in predicted for end in (each.low, each.high)]
        axes.set_ylim(min(losses) / MARGIN, max(losses) * MARGIN)  # what is unsure leaves it
        axes.set(xlabel="training FLOPs", ylabel=f"{fitted.loss.replace('_', ' ')}, nats a token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with atomic_open(path) as file:
            figure.savefig(file, format=path.suffix[1:], metadata=metadata)


def _draw_sizes(axes: Axes, fitted: ScalingLaw) -> None:
    """The runs of each size, and the law over their tokens: dashed beyond them."""
    from matplotlib import colormaps

    sizes = sorted({point.parameters for point in fitted.points})
    for number, size in enumerate(sizes):
        colour = colormaps["viridis"](0.9 * number / max(1, len(sizes) - 1))
        runs = [point for point in fitted.points if point.parameters == size]
        each = runs[0].flops / runs[0].tokens
        tokens = [point.tokens for point in runs]
        axes.plot(
            [point.flops for point in runs],
            [point.loss for point in runs],
            "o",
            color=colour,
            markersize=5,
            label=f"{size:.3g} parameters" if len(sizes) <= 8 else None,
        )
        for low, high, form in ((1, 1, "-"), (1, 2, "--")):
            line = np.geomspace(min(tokens) * low, max(tokens) * high, 50)
            losses = [fitted.law.loss(size, many) for many in line]
            axes.plot(line * each, losses, form, linewidth=1, color=colour)


def _draw_frontier(axes: Axes, fitted: ScalingLaw, asked: Sequence[float]) -> None:
    """The least loss of each budget, as far as the law can say it: dashed where the budget is
    larger than any that was measured."""
    measured = [point.flops for point in fitted.points]
    budgets = np.geomspace(min(measured), max([*measured, *asked]), 100)
    best = np.array([fitted.law.best(budget) for budget in budgets])
    least, low, high = _said(fitted, best)
    sure = high - low <= WIDEST * least
    if not sure.any():
        return
    inside = sure & (budgets <= max(measured))
    axes.fill_between(budgets[sure], low[sure], high[sure], color="black", alpha=0.12, linewidth=0)
    axes.plot(budgets[inside], least[inside], color="black", label="least loss of a budget")
    axes.plot(budgets[sure], least[sure], "--", color="black", linewidth=1, label="extrapolated")


def _draw_predicted(axes: Axes, fitted: ScalingLaw, flops: float, each: Prediction) -> None:
    """The law of a size that was not measured, from a quarter of its tokens on."""
    line = np.geomspace(each.tokens / 4, each.tokens, 30)
    losses, low, high = _said(fitted, np.stack([np.full(len(line), each.parameters), line], 1))
    costs = line * flops / each.tokens
    axes.fill_between(costs, low, high, color="#d55e00", alpha=0.12, linewidth=0)
    axes.plot(costs, losses, "--", color="#d55e00", linewidth=1)


def _said(fitted: ScalingLaw, sizes: Floats) -> tuple[Floats, Floats, Floats]:
    """The losses of (N, D), (n, 2), and the ends of their intervals."""
    losses = [fitted.law.loss(*size) for size in sizes]
    ends = [interval([draw.loss(*size) for draw in fitted.draws]) for size in sizes]
    low, high = np.transpose(ends)
    return np.array(losses), low, high
