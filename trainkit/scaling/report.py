"""The law of some runs as a document, scaling-law/1, and what it says of other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.scaling.isoflop import IsoFlops, fit_isoflops
from trainkit.scaling.law import CONFIDENCE, FREE, STEEPEST, Law, fit_law, interval
from trainkit.scaling.points import MeasuredRuns, ScalingPoint

FEWEST = FREE + 2  # runs: two more than what is fitted
WIDEST = 0.1  # of a predicted loss, that its interval may be wide
ALONG = 0.99  # R^2 of log D over log N from which their exponents cannot be separated

FLATTEST = 1e-3  # exponent: a law without one has no best size


@dataclass(frozen=True)
class Prediction(Record):
    """A loss that was not measured.

    Args:
        parameters: N.
        tokens: D.
        loss: by the law.
        low: the interval's ends; noise of a single run is in it, as large as the residuals.
        high: likewise.
    """

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw(Record):
    """A fitted law.

    Args:
        loss: which loss of the runs.
        setting: what the runs share: data, tokenizer, length of a sample.
        points: the runs.
        residuals: log of measured over fitted loss, run by run.
        law: by approach 3.
        intervals: of its numbers, and of `a` and `b`: the best N is proportional to C^a, D to C^b.
        confidence: of all intervals.
        draws: laws of the bootstrap.
        isoflops: by approach 2; None where the runs are not of equal budgets.
    """

    SCHEMA = "scaling-law/1"
    loss: str
    setting: Mapping[str, str]
    points: tuple[ScalingPoint, ...]
    residuals: tuple[float, ...]
    law: Law
    intervals: Mapping[str, tuple[float, float]]
    confidence: float
    draws: tuple[Law, ...]
    isoflops: IsoFlops | None

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """The loss of a size that was not measured.

        Raises ConfigError (exit 3) where the interval is wider than WIDEST of it.
        """
        noise = np.random.default_rng(0).choice(np.exp(self.residuals), len(self.draws))
        drawn = [each.loss(parameters, tokens) for each in self.draws]
        low, high = interval((noise * drawn).tolist(), self.confidence)
        loss = self.law.loss(parameters, tokens)
        if not high - low <= WIDEST * loss:
            largest = max(point.parameters for point in self.points)
            raise ConfigError(
                f"the law cannot say the loss of {parameters:,.4g} parameters and {tokens:,.4g}"
                f" tokens: {low:.3f} to {high:.3f} is wider than {WIDEST:.0%} of {loss:.3f}",
                hint=f"the largest measured has {largest:,} parameters: measure larger ones, with"
                " half and twice the tokens too",
            )
        return Prediction(parameters, tokens, loss, low, high)


def scaling_law(runs: MeasuredRuns, seed: int = 0) -> ScalingLaw:
    """Fit both approaches, as far as the runs allow.

    Args:
        runs: see `read_points`.
        seed: of the bootstrap.

    Raises:
        ConfigError: too few runs, all along one line of N and D, losses that do not depend on one
            of them, or the least loss of a budget is at its edge (exit 3).
    """
    points = runs.points
    _refuse(points)
    sizes, tokens, losses = (
        [getattr(point, key) for point in points] for key in ("parameters", "tokens", "loss")
    )
    fitted = fit_law(sizes, tokens, losses, seed)
    _refuse_fit(fitted.law)
    intervals = {
        key: interval([getattr(each, key) for each in fitted.draws])
        for key in ("E", "A", "B", "alpha", "beta")
    }
    sloped = [each for each in fitted.draws if each.alpha + each.beta > 0]
    a = [each.beta / (each.alpha + each.beta) for each in sloped]
    intervals |= {"a": interval(a), "b": interval([1 - each for each in a])}
    return ScalingLaw(
        runs.loss,
        runs.setting,
        tuple(points),
        tuple(fitted.residuals),
        fitted.law,
        intervals,
        CONFIDENCE,
        tuple(fitted.draws),
        fit_isoflops(points, seed),
    )


def _refuse_fit(law: Law) -> None:
    """Raise ConfigError for a fit whose exponent is at its bound: its draws are there too, so
    intervals would be narrow where nothing is known."""
    for what, exponent in (("parameters", law.alpha), ("tokens", law.beta)):
        if not FLATTEST < exponent < STEEPEST - FLATTEST:
            raise ConfigError(
                f"the losses do not tell what more {what} do: the exponent is fitted as"
                f" {exponent:.2g}, the least or the most it can be",
                hint="train sizes that are further apart, or with less noise: a larger validation"
                " set, more tokens",
            )


def _refuse(points: Sequence[ScalingPoint]) -> None:
    """Raise ConfigError for points that fix no law."""
    if len(points) < FEWEST:
        raise ConfigError(
            f"{len(points)} runs fix no law of {FREE} numbers: it needs {FEWEST} at least",
            hint="invoke scale BUDGET --job BASE writes a ladder of them",
        )
    sizes, tokens = (
        np.log([getattr(point, key) for point in points]) for key in ("parameters", "tokens")
    )
    for name, logs in (("parameters", sizes), ("tokens", tokens)):
        if len(np.unique(logs)) < 3:
            raise ConfigError(f"the runs have fewer than three numbers of {name}")
    if np.corrcoef(sizes, tokens)[0, 1] ** 2 > ALONG:
        ratio = np.exp(np.median(tokens - sizes))
        raise ConfigError(
            f"all runs have about {ratio:.3g} tokens to a parameter: what more parameters do and"
            " what more tokens do cannot be separated",
            hint="train some with half, some with twice the tokens",
        )
