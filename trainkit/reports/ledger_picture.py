"""The ledger of a run's time as a page shows it: a bar of sums, a bar over time, a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainkit.reports.chart import text
from trainkit.reports.ledger import BINS, WORDS, Bin, Ledger
from trainkit.reports.words import duration

SLOTS = 800  # of the bar over time: what fills most of a slot is its colour


def kind(bin: Bin) -> str:
    """Its class in page.css."""
    return "lost-bin" if bin == "lost" else bin


def ledger_section(ledger: Ledger) -> Iterator[str]:
    """The section of a page."""
    yield "<h2>Where the time went</h2>"
    wall = ledger.wall_seconds
    if not wall:
        yield "<p>No time has passed yet.</p>"
        return
    seconds = ledger.seconds
    yield '<p class="soft">All of it</p>' + _bar([(bin, seconds[bin] / wall) for bin in BINS])
    yield '<p class="soft">In its order</p>' + _bar(_in_order(ledger))
    yield '<div class="scroll"><table><tbody>'
    for bin in BINS:
        if seconds[bin]:
            yield (
                '<tr><td><svg class="swatch" width="12" height="12">'
                f'<rect class="{kind(bin)}" width="12" height="12"/></svg>{text(WORDS[bin])}</td>'
                f'<td class="n">{text(duration(seconds[bin]))}</td>'
                f'<td class="n">{100 * seconds[bin] / wall:.1f} %</td></tr>'
            )
    yield (
        f'<tr><td><b>from submission to end</b></td><td class="n"><b>{text(duration(wall))}</b>'
        '</td><td class="n">100 %</td></tr></tbody></table></div>'
    )


def _bar(parts: list[tuple[Bin, float]]) -> str:
    cells = []
    at = 0.0
    for bin, part in parts:
        if part > 0:
            cells.append(
                f'<rect class="{kind(bin)}" x="{100 * at:.3f}%" width="{100 * part:.3f}%"'
                f' height="26"><title>{text(WORDS[bin])}</title></rect>'
            )
        at += part
    return f'<div class="bar"><svg width="100%" height="26">{"".join(cells)}</svg></div>'


def _in_order(ledger: Ledger) -> list[tuple[Bin, float]]:
    """What fills most of each slot of time, neighbours put together."""
    begin = ledger.spans[0].begin
    slot = ledger.wall_seconds / SLOTS
    filled: list[dict[Bin, float]] = [{} for _ in range(SLOTS)]
    for span in ledger.spans:
        first = int((span.begin - begin) / slot)
        last = int((span.end - begin) / slot)
        for number in range(first, min(last, SLOTS - 1) + 1):
            left = max(span.begin, begin + number * slot)
            right = min(span.end, begin + (number + 1) * slot)
            filled[number][span.bin] = filled[number].get(span.bin, 0.0) + max(0.0, right - left)
    chosen = [max(each, key=lambda bin: each[bin], default=BINS[-1]) for each in filled]
    return [(bin, len(list(group)) / SLOTS) for bin, group in itertools.groupby(chosen)]
