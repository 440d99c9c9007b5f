"""Fit the constants of the time model on a file of measured timings.

python benchmarks/support/plan_calibrate.py ROWS.csv [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.timing_rows import Row, read_rows
from trainkit.plan.time.constants import FOLDER, fitted, kind_of
from trainkit.plan.time.step import step_time

# name: (what is expected, how far it may be off as a standard deviation of its logarithm; of
# `hidden`, parts from 0 to 1: of its log-odds). Where from: data sheets, published profiles.
PRIORS: dict[str, tuple[float, float]] = {
    "efficiency.t4": (0.5, 0.3),
    "efficiency.v100": (0.7, 0.2),
    "efficiency.a100": (0.8, 0.15),
    "efficiency.h100": (0.72, 0.15),
    "efficiency.b200": (0.72, 0.15),
    "efficiency.b300": (0.72, 0.15),
    "narrow.8": (0.75, 0.2),
    "narrow.4": (0.6, 0.3),
    "attention": (0.6, 0.3),
    "memory": (0.8, 0.15),
    "wave": (0.5, 0.5),
    "depth": (128.0, 0.5),
    "casts": (1.5, 0.3),
    "scores": (7.0, 0.3),
    "odd": (0.2, 0.7),
    "link": (0.7, 0.2),
    "network": (0.7, 0.2),
    "sockets": (0.4, 0.4),
    "link_latency": (8e-6, 0.6),
    "network_latency": (2e-5, 0.6),
    "hop": (4e-6, 0.4),
    "bucket": (5e7, 0.4),
    "exchange": (1.0, 0.6),
    "context": (0.5, 0.6),
    "stragglers": (0.005, 0.7),
    "unfused": (0.4, 0.5),
    "parts": (3.0, 0.5),
    "unaligned": (1.0, 0.7),
    "logits": (8.0, 0.5),
    "exponentials": (2.5e10, 0.5),
    "grouped": (500.0, 0.7),
}
OF_SOFTWARE: dict[str, tuple[float, float]] = {
    "slower": (1.0, 0.1),
    "passes": (1.5, 0.4),
    "launches": (3e-4, 0.6),
    "fixed": (0.01, 1.5),
    "hidden_data": (0.5, 1.0),
    "hidden_tensor": (0.1, 1.0),
    "hidden_pipeline": (0.3, 1.0),
}
SOFTWARE = ("megatron-2021", "megatron", "jax", "fsdp")
for _name, _prior in OF_SOFTWARE.items():
    PRIORS.update({f"{_name}.{_kind}": _prior for _kind in SOFTWARE})
ERROR = 0.08  # of a row's logarithm that the model cannot know
HUBER = 0.15


def _logit(name: str) -> bool:
    return name.startswith("hidden")


def to_free(values: dict[str, float]) -> np.ndarray:
    return np.array(
        [
            math.log(v / (1 - v)) if _logit(n) else math.log(v)
            for n, v in ((name, values[name]) for name in PRIORS)
        ]
    )


def from_free(free: np.ndarray) -> dict[str, float]:
    return {
        name: 1 / (1 + math.exp(-x)) if _logit(name) else math.exp(x)
        for name, x in zip(PRIORS, free, strict=True)
    }


def residuals(rows: Sequence[Row], free: np.ndarray) -> np.ndarray:
    constants = from_free(free)
    return np.array([math.log(step_time(r.setup, constants).seconds / r.seconds) for r in rows])


def weights(rows: Sequence[Row]) -> np.ndarray:
    """A group counts as the root of its rows, so that none drowns the others."""
    sizes = Counter(row.group for row in rows)
    return np.array([sizes[row.group] ** -0.5 for row in rows])


def jacobian(rows: Sequence[Row], free: np.ndarray, base: np.ndarray) -> np.ndarray:
    columns = []
    for index in range(len(free)):
        moved = free.copy()
        moved[index] += 0.01
        columns.append((residuals(rows, moved) - base) / 0.01)
    return np.stack(columns, axis=1)


CENTRE = to_free({name: prior[0] for name, prior in PRIORS.items()})
SPREAD = np.array([prior[1] for prior in PRIORS.values()])


def cost(rows: Sequence[Row], free: np.ndarray, miss: np.ndarray) -> float:
    """What a fit makes small: misses, robust against single rows, and distance from the priors."""
    size = np.abs(miss)
    loss = np.where(size < HUBER, miss**2, 2 * HUBER * size - HUBER**2)
    away = (free - CENTRE) / SPREAD
    return float((weights(rows) * loss).sum() / ERROR**2 + (away**2).sum())


def newton(
    rows: Sequence[Row], free: np.ndarray, miss: np.ndarray, slopes: np.ndarray
) -> np.ndarray:
    """A Gauss-Newton step.

    Args:
        rows: that are fitted.
        free: where.
        miss: their residuals there.
        slopes: of the residuals.
    """
    soft = weights(rows) * np.minimum(1, HUBER / np.maximum(np.abs(miss), 1e-9)) / ERROR**2
    matrix = slopes.T @ (soft[:, None] * slopes) + np.diag(SPREAD**-2)
    side = -(slopes.T @ (soft * miss)) - (free - CENTRE) / SPREAD**2
    return np.clip(np.linalg.solve(matrix, side), -0.7, 0.7)


def fit(rows: Sequence[Row], start: np.ndarray, rounds: int) -> np.ndarray:
    """Gauss-Newton from `start`, until a round gains next to nothing.

    Args:
        rows: that are fitted.
        start: free values.
        rounds: at most.
    """
    free = start
    miss = residuals(rows, free)
    now = cost(rows, free, miss)
    for _ in range(rounds):
        move = newton(rows, free, miss, jacobian(rows, free, miss))
        for scale in (1.0, 0.5, 0.2, 0.05):
            tried = free + scale * move
            there = residuals(rows, tried)
            then = cost(rows, tried, there)
            if then < now:
                break
        else:
            return free
        gained = now - then
        free, miss, now = tried, there, then
        if gained < LITTLE:
            break
    return free


LITTLE = 0.3  # of the cost


def left_out(
    rows: Sequence[Row], folds: Sequence[object], start: np.ndarray
) -> dict[object, np.ndarray]:
    """Constants fitted on all rows but those of each fold: Newton's steps from the fit on all
    rows with the slopes found there, and residuals found again at every step.

    Args:
        rows: all of them.
        folds: which each row belongs to.
        start: the fit on all rows.
    """
    miss = residuals(rows, start)
    slopes = jacobian(rows, start, miss)
    found = {}
    for fold in set(folds):
        kept = np.array([other != fold for other in folds])
        inside = [row for row, keep in zip(rows, kept, strict=True) if keep]
        free = start
        here = miss[kept]
        for _ in range(STEPS):
            free = free + newton(inside, free, here, slopes[kept])
            here = residuals(inside, free)
        found[fold] = free
    return found


STEPS = 2
MOST = 45  # rows of a group that a fit looks at


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Every n-th row of large groups."""
    sizes = Counter(row.group for row in rows)
    seen: Counter[tuple[str, str, str]] = Counter()
    kept = []
    for row in rows:
        step = -(-sizes[row.group] // MOST)
        if seen[row.group] % step == 0:
            kept.append(row)
        seen[row.group] += 1
    return kept


def predict(rows: Sequence[Row], fold: str) -> dict[str, float]:
    """Seconds by row id; under a fold from constants fitted without the row's group or source."""
    if fold == "none":
        return {row.id: step_time(row.setup, fitted()).seconds for row in rows}

    def key(row: Row) -> object:
        return row.group if fold == "group" else row.source

    kept = thinned(rows)
    others = left_out(kept, [key(row) for row in kept], to_free(fitted()))
    constants = {left: from_free(free) for left, free in others.items()}
    return {row.id: step_time(row.setup, constants[key(row)]).seconds for row in rows}


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def spread(rows: Sequence[Row], predicted: dict[str, float]) -> dict[str, float]:
    """How far off the logarithm of a prediction is, as a standard deviation, of dense models and
    of those with experts: from the 80th percentile, each group as heavy as another."""
    misses: dict[str, dict[object, list[float]]] = {"dense": {}, "experts": {}}
    for row in rows:
        kind = "experts" if row.setup.shape.experts else "dense"
        miss = abs(math.log(predicted[row.id] / row.seconds))
        misses[kind].setdefault(row.group, []).append(miss)
    return {
        kind: round(float(np.mean([quantile(m, 0.8) for m in groups.values()])) / 1.2816, 4)
        for kind, groups in misses.items()
        if groups
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="a file with the columns of given.csv")
    parser.add_argument("--out", type=Path, default=FOLDER / "fitted.json")
    asked = parser.parse_args()
    rows = read_rows(asked.rows)
    known = fitted()  # a fit goes on from the one that is there
    start = to_free({name: known.get(name, prior[0]) for name, prior in PRIORS.items()})
    free = fit(thinned(rows), start, 30)
    found = {name: float(f"{value:.4g}") for name, value in from_free(free).items()}
    document = {
        "source": f"benchmarks/support/plan_calibrate.py, {len(rows)} public rows of"
        f" {len({row.group for row in rows})} groups",
        "rows": dict(
            sorted(Counter(kind_of(r.setup.machine, r.setup.software) for r in rows).items())
        ),
        "constants": found,
        "spread": {},
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    fitted.cache_clear()
    document["spread"] = spread(rows, predict(rows, "group"))
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
