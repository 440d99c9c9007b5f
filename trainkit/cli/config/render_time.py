"""Where a predicted step's time goes, and the layouts of a search, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainkit.plan.memory import TIGHT
from trainkit.plan.planner import Plan
from trainkit.plan.search import Ranked, Search, describe
from trainkit.plan.storage import GIB

LEAST = 0.0005  # of a step: less is not shown
WORDS = {  # what a term is, for people
    "products": "matrix products of the blocks",
    "attention": "attention",
    "memory": "norms, activations and what else memory bounds",
    "recomputation": "forward again, in backward",
    "launches": "waiting for the host to launch",
    "tensor-parallel": "sums of tensor parallelism, not hidden",
    "experts": "tokens to experts and back",
    "context": "keys and values of other parts of the sequence",
    "head": "the head and its loss, beyond the fullest stage",
    "sharding": "weights gathered under ZeRO 3, not hidden",
    "pipeline": "transfers between stages, not hidden",
    "bubble": "the pipeline's bubble",
    "data-parallel": "sums of gradients, new weights, not hidden",
    "optimizer": "the optimizer",
    "stragglers": "the slowest of many nodes",
}


def print_terms(console: Console, plan: Plan) -> None:
    """What `--explain time` prints."""
    duration = plan.duration
    if not plan.layout.fills_world:
        console.print(f"time: none, since the layout does not fill {plan.layout.world} ranks")
        return
    if plan.between:
        console.print("time: not known before the vocabulary is")
        return
    if duration is None:
        console.print("time: not known for this device: devices.X.peak_tflops is missing")
        return
    if not duration.speed.step_terms:
        console.print(f"time: {escape(duration.speed.source)}; there is nothing to predict")
        return
    table = Table(box=None)
    for heading in ("seconds", "share", "of a step"):
        table.add_column(heading, justify="left" if heading == "of a step" else "right")
    terms = sorted(duration.speed.step_terms.items(), key=lambda term: -term[1])
    for name, seconds in terms:
        if seconds > LEAST * duration.step_seconds:
            share = f"{seconds / duration.step_seconds:.1%}"
            table.add_row(f"{seconds:,.4g}", share, WORDS[name])
    table.add_row(f"{duration.step_seconds:,.4g}", "100%", "all")
    console.print(table)
    console.print(escape(duration.speed.source))


def print_search(console: Console, found: Search, price: float) -> None:
    """The best layouts, and why the others lose.

    Args:
        console: where to.
        found: by the search.
        price: of a device and hour; 0: not asked for.
    """
    table = Table(box=None)
    headings = ["", "nodes", "layout", "tokens/s", "memory", "days"]
    for heading in [*headings, *(["price"] if price else []), "why not"]:
        table.add_column(heading, overflow="fold")
    for number, each in enumerate(found.ranked, 1):
        speed = f"{each.tokens_per_second:,.0f}" if found.known else "-"
        cells = [str(number), str(each.job.nodes), describe(each.change), speed]
        cells += [_memory(each), _days(each)]
        if price:
            cost = price_of(each, price)
            cells.append(f"{cost:,.0f}" if cost is not None else "-")
        tight = "; memory-tight" if _is_tight(each) else ""
        table.add_row(*cells, why_slower(each, found.ranked[0]) + tight)
    if found.ranked:
        console.print(table)
    if any(map(_is_tight, found.ranked)):
        console.print(
            f"memory-tight: over {TIGHT:.0%} of the device, of which the reserve is assumed"
        )
    for line in _remarks(found):
        console.print(line)
    console.print(f"{found.considered:,} layouts; left out:")
    for code, count in found.refused.most_common():
        example = found.nearest.get(code, "")
        text = f"  {count:>7,} {code}"
        if example:
            text += f", {'the fastest' if code == 'memory' else 'such as'}: {example}"
        console.print(text, highlight=False)


def _is_tight(each: Ranked) -> bool:
    return bool(each.plan and each.plan.memory and each.plan.memory.tight)


def _memory(each: Ranked) -> str:
    """Of the fullest rank, with the band of published runs."""
    memory = each.plan.memory if each.plan else None
    if memory is None:
        return "-"
    band = ""
    if memory.band_bytes:
        band = " ({:.0f} to {:.0f})".format(*(size / GIB for size in memory.band_bytes))
    return f"{memory.fullest.total_bytes / GIB:.1f} GiB{band}"


def _days(each: Ranked) -> str:
    """Of the whole run, with the interval that they are likely in."""
    plan = each.plan
    if plan is None or plan.days is None:
        return "-"
    interval = plan.duration.days_interval if plan.duration else None
    return f"{plan.days:,.2f}" + (" ({:,.2f} to {:,.2f})".format(*interval) if interval else "")


def _remarks(found: Search) -> Iterator[str]:
    """What is to be known of the times."""
    if not found.known:
        yield f"[yellow]note[/] {_why_no_times(found)}"
        return
    if found.asked and found.ranked:
        gain = found.ranked[0].tokens_per_second / found.asked.tokens_per_second - 1
        yield f"The first is {gain:+.1%} in tokens/s against the job's own layout."
    if found.calibrated_by:
        yield f"Times are the model's, corrected by run {escape(found.calibrated_by)}."
    plan = found.ranked[0].plan if found.ranked else None
    if plan and plan.duration and plan.duration.speed.not_fitted:
        yield f"[yellow]note[/] no public timings behind them: {plan.duration.speed.not_fitted}"


def _why_no_times(found: Search) -> str:
    """What is missing for times."""
    if found.ranked and found.ranked[0].job.cluster.device.kind == "cpu":
        return (
            "how fast these CPUs are is not known before a run of this job was measured: an order"
            " of layouts, without times"
        )
    text = (
        "the device is not known (devices.X.peak_tflops): the order is that of any device, without"
        " times"
    )
    if found.ranked and found.ranked[0].job.cluster.device.memory_bytes is None:
        text += "; nor is its memory (memory_bytes): nothing is said of what fits"
    return text


def price_of(each: Ranked, price: float) -> float | None:
    """Of the whole run; None where its time is not known."""
    if each.plan is None or each.plan.duration is None:
        return None
    return each.plan.duration.device_hours * price


def why_slower(each: Ranked, best: Ranked) -> str:
    """The terms that a token costs more in than in the best layout."""
    if each is best:
        return "the fastest"

    def per_token(ranked: Ranked, name: str) -> float:
        work = ranked.job.global_batch_size * ranked.job.model.seq_length
        return ranked.terms[name] * ranked.job.world_size / work

    more = {name: per_token(each, name) - per_token(best, name) for name in each.terms}
    whole = sum(per_token(best, name) for name in best.terms)
    worst = sorted(more, key=lambda name: -more[name])[:2]
    return ", ".join(
        f"{name} {more[name] / whole:+.1%}" for name in worst if more[name] > LEAST * whole
    )
