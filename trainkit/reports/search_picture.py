"""A search over layouts as a picture, by matplotlib (the extra `report`): memory against speed,
scaling over nodes, where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.printable import printable
from trainkit.plan.cloud import Point, best_by_nodes, pareto, thinned
from trainkit.plan.search import Ranked, describe
from trainkit.plan.storage import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
BARS = 8  # layouts whose steps are shown
WIDTH = 6.5  # inches: panels one below the other, so that a narrow screen can show them
# Okabe and Ito, 2008: colours that colour-blind people can tell apart; hatches do it in grey, too
GROUPS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("matrix products, head", "#0072b2", "", ("products", "head")),
    ("attention", "#56b4e9", "", ("attention",)),
    ("bound by memory, launches", "#009e73", "", ("memory", "launches")),
    ("recomputation", "#f0e442", "//", ("recomputation",)),
    ("tensor parallelism", "#d55e00", "", ("tensor-parallel",)),
    ("pipeline: bubble, transfers", "#e69f00", "xx", ("bubble", "pipeline")),
    ("data parallelism, sharding", "#cc79a7", "", ("data-parallel", "sharding")),
    ("optimizer, experts, context, stragglers", "#999999", "..", ()),
)
NAMED = {term for group in GROUPS for term in group[3]}


@dataclass(frozen=True)
class SearchPicture:
    """What is drawn.

    Args:
        title: above it all.
        ranked: the best layouts, fastest first.
        points: of all kinds of layouts.
        measured: tokens a second of runs, by nodes.
        known: speeds are tokens a second; False: only their order means something.
    """

    title: str
    ranked: Sequence[Ranked]
    points: Sequence[Point]
    measured: Mapping[int, float] = field(default_factory=dict)
    known: bool = True


def draw_search(found: SearchPicture, path: Path) -> None:
    """Draw into a .svg or .png file.

    Raises ConfigError (exit 3) for another ending, and without matplotlib.
    """
    refuse_format(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    best = best_by_nodes(found.points)
    shown = found.ranked[:BARS]
    heights = [3.2, *([2.8] if len(best) > 1 else []), 0.9 + 0.38 * len(shown)]
    with rc_context({"svg.hashsalt": found.title, "svg.fonttype": "none", "font.size": 10}):
        size = (WIDTH, sum(heights) + 1.2)
        figure = Figure(figsize=size, layout="constrained", dpi=110)
        figure.suptitle(printable(found.title), parse_math=False)
        panels = figure.subplots(len(heights), height_ratios=heights)
        _draw_front(panels[0], found)
        if len(best) > 1:
            _draw_scaling(panels[1], best, found)
        bars = panels[-1]
        _draw_terms(bars, shown)
        figure.legend(
            *bars.get_legend_handles_labels(),
            loc="outside lower center",
            frameon=False,
            fontsize=8,
            ncols=2,
        )
        with atomic_open(path) as file:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(file, format=path.suffix[1:], metadata=metadata)


def refuse_format(path: Path) -> None:
    """Raises ConfigError (exit 3) for an ending that is not drawn."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {' or '.join(FORMATS)}")


def _unit(found: SearchPicture) -> str:
    return "predicted tokens/s" if found.known else "relative speed (device not known)"


def _rounded(value: float) -> str:
    """To three figures, with commas."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _draw_front(axes: Axes, found: SearchPicture) -> None:
    """Memory against speed."""
    front = pareto(found.points)
    others = thinned(list(found.points))
    axes.plot(
        [point.bytes / GIB for point in others],
        [point.tokens_per_second for point in others],
        "o",
        color="#999999",
        markersize=3,
        label="layouts that fit",
    )
    axes.plot(
        [point.bytes / GIB for point in front],
        [point.tokens_per_second for point in front],
        "D-",
        color="#d55e00",
        markersize=5,
        label="none is faster with less memory",
    )
    if front:
        room = found.ranked[0].job.cluster.device.memory_bytes
        if room:
            axes.axvline(room / GIB, color="black", linestyle=":", label="memory of the device")
    axes.set(xlabel="GiB of the fullest rank", ylabel=_unit(found), title="memory and speed")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _rounded(value))
    axes.grid(alpha=0.3)
    axes.legend(  # hides no point
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=3,
        frameon=False,
        fontsize=8,
        columnspacing=1.2,
    )


def _draw_scaling(axes: Axes, best: Mapping[int, float], found: SearchPicture) -> None:
    """The best layout of each number of nodes, beside a straight line and measured runs."""
    nodes = list(best)
    first = best[nodes[0]] / nodes[0]
    ideal = [first * number for number in nodes]
    axes.plot(nodes, ideal, "--", color="black", label="ideal")
    part = best[nodes[-1]] / ideal[-1]
    label = f"predicted, on {nodes[-1]} nodes {part:.0%} of ideal"
    axes.plot(nodes, list(best.values()), "o-", color="#0072b2", label=label)
    if found.measured:
        seen = sorted(found.measured.items())
        axes.plot(
            [number for number, _ in seen],
            [speed for _, speed in seen],
            "D",
            color="#d55e00",
            markersize=7,
            label="measured runs",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(nodes, [str(number) for number in nodes])
    axes.set_yticks(ideal, [_rounded(speed) for speed in ideal])
    axes.set(xlabel="nodes", ylabel=_unit(found), title="scaling, global batch as it is")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_terms(axes: Axes, ranked: Sequence[Ranked]) -> None:
    """Where a step's time goes: device-seconds of a token, those of the first layout as 100."""
    whole = _per_token(ranked[0], ranked[0].seconds) if ranked else 1.0
    left = [0.0] * len(ranked)
    for label, colour, hatch, terms in GROUPS:
        wide = [100 * _per_token(each, _seconds(each, terms)) / whole for each in ranked]
        axes.barh(
            range(len(ranked)),
            wide,
            left=left,
            height=0.5,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=label,
        )
        left = [before + more for before, more in zip(left, wide, strict=True)]
    for row, each in enumerate(ranked):
        nodes = "1 node" if each.job.nodes == 1 else f"{each.job.nodes} nodes"
        axes.text(0, row - 0.27, f"{nodes}: {describe(each.change)}", fontsize=8, va="bottom")
    axes.set(yticks=[], ylim=(len(ranked) - 0.6, -0.8))
    axes.set(
        xlabel="device time a token, the first layout's = 100", title="where a step's time goes"
    )


def _seconds(each: Ranked, terms: tuple[str, ...]) -> float:
    """Of the group of terms; of the last group, of all that no other names."""
    if terms:
        return sum(each.terms.get(term, 0.0) for term in terms)
    return sum(seconds for term, seconds in each.terms.items() if term not in NAMED)


def _per_token(each: Ranked, seconds: float) -> float:
    job = each.job
    return seconds * job.world_size / (job.global_batch_size * job.model.seq_length)
