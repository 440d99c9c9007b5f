"""L(N, D) = E + A / N^alpha + B / D^beta, fitted to runs as Hoffmann et al. did (arXiv:2203.15556,
approach 3): the least Huber loss of log L, with the three terms as log-sum-exp, of many starts.

Where they take L-BFGS, this takes Gauss-Newton steps on reweighted residuals (the same minimum,
Huber 1964), since numpy does these for all starts and all draws of a bootstrap at once: a second
instead of minutes, without scipy. Symbols: S fits at once, n runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record

Floats = NDArray[np.float64]
DELTA = 1e-3  # of the Huber loss, in log L
STEPS = 400
DRAWS = 400
CONFIDENCE = 0.99  # of intervals: wide, since a bootstrap of few runs is too sure of itself
STEEPEST = 2.5  # exponent: noise can make a draw look as steep as one likes
FREE = 5  # numbers that are fitted
LEAST_START = 0.1  # of the mean loss, that a draw's E begins with: at 0 it has no slope, and stays


@dataclass(frozen=True)
class Law(Record):
    """The five numbers; N in parameters, D in tokens, L in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """L(N, D)."""
        return float(self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta)

    def best(self, flops: float) -> tuple[float, float]:
        """(N, D) with the least loss where training costs 6 N D = `flops`."""
        share = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / share)
        parameters = scale * (flops / 6) ** (self.beta / share)
        return parameters, flops / 6 / parameters


@dataclass(frozen=True)
class FittedLaw:
    """A law and how sure it is.

    Args:
        law: with the least Huber loss.
        draws: laws of runs that are drawn again, by their residuals: see `fit_law`.
        residuals: log of measured over fitted loss, run by run.
        huber: the least loss.
    """

    law: Law
    draws: Sequence[Law]
    residuals: Sequence[float]
    huber: float


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between which this part of the values lies, as many below as above."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def fit_law(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], seed: int = 0
) -> FittedLaw:
    """Fit runs, and as often as DRAWS the law's own losses with residuals that are drawn from those
    of the fit. Sizes and tokens stay as they are, since somebody chose them. What was fitted hides
    a part of the noise, and few runs say little of how much: each draw multiplies its residuals
    with sqrt(n / X), X of a chi-square distribution of n - 5 degrees, as Student's t has it.

    Args:
        parameters: N of each run, more than five.
        tokens: D.
        losses: L.
        seed: of the draws.
    """
    x, y, measured = (np.log(np.asarray(each, float)) for each in (parameters, tokens, losses))
    middle = np.array([x.mean(), y.mean()])
    problem = _Problem(x - middle[0], y - middle[1])
    found, cost = problem.minimise(_starts(measured.mean()), measured[None])
    best = found[np.argmin(cost)]
    fitted = problem.fitted(best[None])[0][0]
    residuals = measured - fitted
    source = np.random.default_rng(seed)
    wider = np.sqrt(len(x) / source.chisquare(len(x) - FREE, (DRAWS, 1)))
    again = fitted + wider * source.choice(residuals, (DRAWS, len(x)))
    begin = best.copy()
    begin[0] = max(best[0], measured.mean() + np.log(LEAST_START))
    drawn, _ = problem.minimise(np.repeat(begin[None], DRAWS, 0), again)
    return FittedLaw(
        _law(best, middle),
        [_law(each, middle) for each in drawn],
        residuals.tolist(),
        float(cost.min()),
    )


def _law(theta: Floats, middle: Floats) -> Law:
    e, a, b, alpha, beta = theta
    scaled = np.exp([e, a + alpha * middle[0], b + beta * middle[1]])
    return Law(*(float(each) for each in (*scaled, alpha, beta)))


def _starts(mean: float) -> Floats:
    """(S, 5): the shares that E and A may have of the mean log loss, and exponents."""
    shares = (0.1, 0.35, 0.6, 0.85)
    exponents = (0.1, 0.3, 0.6, 1.2)
    grid = itertools.product(shares, shares, exponents, exponents)
    logs = np.log
    return np.array(
        [
            (mean + logs(e), mean + logs((1 - e) * a), mean + logs((1 - e) * (1 - a)), n, d)
            for e, a, n, d in grid
        ]
    )


@dataclass(frozen=True)
class _Problem:
    """x, y: log N and log D about their means, (n,)."""

    x: Floats
    y: Floats

    def fitted(self, theta: Floats) -> tuple[Floats, Floats]:
        """log L (S, n) of (S, 5), and the parts of its terms (3, S, n)."""
        e, a, b, alpha, beta = theta.T[..., None]
        terms = np.stack(
            [np.broadcast_to(e, (len(theta), len(self.x))), a - alpha * self.x, b - beta * self.y]
        )
        top = terms.max(0)
        parts = np.exp(terms - top)
        whole = parts.sum(0)
        return top + np.log(whole), parts / whole

    def minimise(self, theta: Floats, measured: Floats) -> tuple[Floats, Floats]:
        """Levenberg and Marquardt's damped steps, each weighted as Huber's loss asks.

        Args:
            theta: starts, (S, 5).
            measured: log L, (S, n) or (1, n).

        Returns: the ends (S, 5) and their losses (S).
        """
        theta = theta.copy()
        measured = np.broadcast_to(measured, (len(theta), len(self.x)))
        cost = _huber(self.fitted(theta)[0] - measured)
        damping = np.full(len(theta), 1e-2)
        going = np.arange(len(theta))
        for _ in range(STEPS):
            tried = theta[going] - self._step(theta[going], measured[going], damping[going])
            tried[:, 3:] = np.clip(tried[:, 3:], 0.0, STEEPEST)
            there = _huber(self.fitted(tried)[0] - measured[going])
            better = there < cost[going]
            gain = np.where(better, cost[going] - there, np.inf) / np.maximum(cost[going], 1e-300)
            theta[going[better]] = tried[better]
            cost[going[better]] = there[better]
            damping[going] *= np.where(better, 0.3, 5.0)
            going = going[(damping[going] < 1e8) & (gain > 1e-9)]
            if not len(going):
                break
        return theta, cost

    def _step(self, theta: Floats, measured: Floats, damping: Floats) -> Floats:
        fitted, (of_e, of_a, of_b) = self.fitted(theta)
        off = fitted - measured
        slopes = np.stack([of_e, of_a, of_b, -of_a * self.x, -of_b * self.y], 2)
        weighted = slopes / np.maximum(1.0, np.abs(off) / DELTA)[..., None]
        normal = np.einsum("sni,snj->sij", weighted, slopes)
        diagonal = np.einsum("sii->si", normal)
        diagonal += damping[:, None] * diagonal + 1e-12
        return np.linalg.solve(normal, np.einsum("sni,sn->si", weighted, off)[..., None])[..., 0]


def _huber(off: Floats) -> Floats:
    """Summed over runs."""
    size = np.abs(off)
    each = np.where(size <= DELTA, 0.5 * off**2, DELTA * (size - 0.5 * DELTA))
    return np.asarray(each.sum(-1))
