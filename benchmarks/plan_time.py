"""How well the time model predicts measured steps, and the layouts that it would choose.

    python benchmarks/plan_time.py [--rows FILE.csv] [--fold group|source|none] [--json]

Without --rows: the public rows that the constants were fitted on, each group of them predicted by
constants fitted on the others (--fold group). With it, any file of the same columns, predicted
by the constants of the repository (--fold none).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.plan_calibrate import predict, quantile
from benchmarks.support.timing_rows import Row, read_rows
from trainkit.plan.time.setup import Setup

GIVEN = Path(__file__).resolve().parents[2] / "shared/timings/given.csv"
FEWEST = 4  # layouts of a cell in which a choice counts
FIXED = 0.4  # part of the peak


def fixed_efficiency(setup: Setup) -> float:
    """Seconds at 40 % of the peak outside of the bubble, without a network: what plan did."""
    shape, split = setup.shape, setup.split
    mlp = shape.expert_parameters * (shape.topk if shape.experts else 1)
    layer = 2 * (shape.attention_parameters + mlp) + 2 * shape.seq * shape.query
    again = {"full": 1, "selective": 0}.get(split.recompute, 0)
    flops = (3 + again) * shape.layers * layer + 6 * shape.hidden * shape.vocab
    tokens = split.global_batch * shape.seq
    waiting = (split.pipeline - 1) / (split.virtual * split.micro_batches)
    return flops * tokens * (1 + waiting) / (split.world * setup.machine.peak * FIXED)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Tau-b."""
    agree = ties_first = ties_second = pairs = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = first[i] - first[j], second[i] - second[j]
            pairs += 1
            ties_first += not a
            ties_second += not b
            agree += (a * b > 0) - (a * b < 0)
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return agree / scale if scale else 0.0


def errors(rows: Iterable[Row], predicted: dict[str, float]) -> dict[str, float]:
    """Means over groups of the error's mean, median and 90th percentile; and the median and the
    90th percentile of all groups' medians."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.group].append(abs(predicted[row.id] / row.seconds - 1))
    each = list(groups.values())
    medians = [statistics.median(misses) for misses in each]
    return {
        "groups": len(each),
        "mean": statistics.fmean(statistics.fmean(misses) for misses in each),
        "median": statistics.fmean(medians),
        "p90": statistics.fmean(quantile(misses, 0.9) for misses in each),
        "median_of_groups": statistics.median(medians),
        "p90_of_groups": quantile(medians, 0.9),
    }


def cells_of(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows among which a layout can be chosen: the fastest of several measurements of each."""
    cells: dict[tuple[str, ...], dict[object, Row]] = defaultdict(dict)
    for row in rows:
        layouts = cells[row.cell]
        if row.setup not in layouts or row.seconds < layouts[row.setup].seconds:
            layouts[row.setup] = row
    return {
        cell: list(layouts.values()) for cell, layouts in cells.items() if len(layouts) >= FEWEST
    }


def choices(rows: Iterable[Row], predicted: dict[str, float]) -> list[dict[str, object]]:
    """Of each cell: what is chosen, how much slower than the best that is (`regret`), and how
    much slower a random pick would be."""
    found = []
    for cell, members in cells_of(rows).items():
        best = min(row.seconds for row in members)
        lowest = min(predicted[row.id] for row in members)
        # where several are predicted alike, the choice is any of them
        chosen = [row for row in members if predicted[row.id] <= lowest * (1 + 1e-9)]
        found.append(
            {
                "cell": list(cell),
                "layouts": len(members),
                "choice": chosen[0].id,
                "regret": statistics.fmean(row.seconds for row in chosen) / best - 1,
                "random_regret": statistics.fmean(row.seconds for row in members) / best - 1,
                "tau": kendall(
                    [predicted[row.id] for row in members], [row.seconds for row in members]
                ),
            }
        )
    return found


def score(rows: Sequence[Row], predicted: dict[str, float]) -> dict[str, object]:
    """All of the figures, for one set of rows."""
    chosen = choices(rows, predicted)

    def mean(key: str) -> float | None:
        return statistics.fmean(float(str(c[key])) for c in chosen) if chosen else None

    return {
        "rows": len(rows),
        **errors(rows, predicted),
        "cells": len(chosen),
        "tau": mean("tau"),
        "regret": mean("regret"),
        "random_regret": mean("random_regret"),
    }


def report(rows: Sequence[Row], fold: str) -> dict[str, object]:
    """The document that --json prints."""
    predicted = predict(rows, fold)
    fixed = {row.id: fixed_efficiency(row.setup) for row in rows}
    sources = sorted({row.source for row in rows})

    def of(source: str) -> list[Row]:
        return [row for row in rows if row.source == source]

    return {
        "fold": fold,
        "all": score(rows, predicted),
        "fixed_efficiency": score(rows, fixed),
        "sources": {source: score(of(source), predicted) for source in sources},
        "choices": choices(rows, predicted),
        "rows": [
            {
                "id": row.id,
                "seconds": row.seconds,
                "predicted": predicted[row.id],
                "error": predicted[row.id] / row.seconds - 1,
            }
            for row in rows
        ],
    }


def print_report(found: dict[str, object], say: Callable[[str], None] = print) -> None:
    say(
        f"{'':38}{'rows':>5}{'groups':>7}{'mean':>7}{'median':>8}{'p90':>7}{'cells':>6}{'tau':>6}"
        f"{'regret':>8}{'random':>8}"
    )
    sources = found["sources"]
    assert isinstance(sources, dict)
    named = {**sources, "all": found["all"], "all, 40 % of peak": found["fixed_efficiency"]}
    for name, line in named.items():
        text = f"{name[:37]:38}{line['rows']:5}{line['groups']:7}{line['mean']:7.1%}"
        text += f"{line['median']:8.1%}{line['p90']:7.1%}{line['cells']:6}"
        if line["cells"]:
            text += f"{line['tau']:6.2f}{line['regret']:8.1%}{line['random_regret']:8.1%}"
        say(text)
    whole = found["all"]
    assert isinstance(whole, dict)
    say(
        f"over all groups' medians: median {whole['median_of_groups']:.1%}, 90th percentile"
        f" {whole['p90_of_groups']:.1%}; fold: {found['fold']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="a file with the columns of given.csv")
    parser.add_argument("--fold", choices=("group", "source", "none"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    path = asked.rows or GIVEN
    if not path.is_file():
        sys.exit(f"no file {path}: give one with --rows")
    rows = read_rows(path)
    if not rows:
        sys.exit(f"{path}: no row with a shape, a layout, a known device and a measured time")
    found = report(rows, asked.fold or ("none" if asked.rows else "group"))
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        print_report(found)


if __name__ == "__main__":
    main()
