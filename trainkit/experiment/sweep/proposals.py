"""Which values a sweep tries next, by Optuna's tree-structured Parzen estimators (the extra
`sweep`). A proposal follows from the ranges, from what was tried and from a seed alone: no study is
kept beside the sweep's own record, and one that was killed proposes the same again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import JsonValue

from trainkit.base.extras import MissingExtra
from trainkit.jobs.sweeps import Point, Sweep, bounds, draws, rounded

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

MOST_RANDOM = 10  # proposals that are random, before there is something to learn from
ATTEMPTS = 100  # at values that were not tried yet
Tried = Sequence[tuple[Point, float | None]]  # None: not known yet; infinite: it failed
Draw = Mapping[str, JsonValue]


def propose(sweep: Sweep, tried: Tried, count: int) -> list[Point]:
    """The next values of a sweep's `random`, without seeds; fewer where none are left.

    Args:
        sweep: the ranges, how many samples there will be, and the seed of the draws.
        tried: all values that were proposed before, in order, with what they came to: a loss, of
            which the lowest is the best.
        count: so many.

    Raises MissingExtra where Optuna is not installed.
    """
    found = list(tried)
    for _ in range(count):
        known = [values for values, _ in found]
        new = next((each for each in _proposals(sweep, found) if each not in known), None)
        if new is None:
            break
        found.append((new, None))  # what is proposed beside it keeps away from it
    return [values for values, _ in found[len(tried) :]]


def _proposals(sweep: Sweep, tried: Tried) -> Iterator[Point]:
    """What the estimators propose by one seed after the other."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra(
            "sampler = 'tpe' needs Optuna, which is not installed", "sweep"
        ) from None
    space = dict(draws(sweep.random))
    kinds = {key: _distribution(draw) for key, draw in space.items()}
    trials = [_trial(space, kinds, values, loss) for values, loss in tried]
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else it prints that a study begins
    for attempt in range(ATTEMPTS):
        seed = random.Random(f"{sweep.draw_seed} {len(tried)} {attempt}").getrandbits(32)
        sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=min(MOST_RANDOM, (sweep.samples or 0) // 3),
            constant_liar=True,
        )
        study = optuna.create_study(sampler=sampler)
        study.add_trials(trials)
        asked = study.ask(kinds).params
        yield {key: _value(draw, asked[key]) for key, draw in space.items()}


def _distribution(draw: Draw) -> BaseDistribution:
    """Optuna's of a draw; a choice is the number of its value, which may be anything."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    ((kind, values),) = draw.items()
    assert isinstance(values, list), "the schema refuses others"
    if kind == "choice":
        return CategoricalDistribution(range(len(values)))
    low, high = bounds(values)
    if kind == "integer":
        return IntDistribution(int(low), int(high))
    return FloatDistribution(low, high, log=kind == "log")


def _value(draw: Draw, asked: float) -> JsonValue:
    """The job's value."""
    ((kind, values),) = draw.items()
    assert isinstance(values, list), "the schema refuses others"
    if kind == "choice":
        return values[int(asked)]
    if kind == "integer":
        return int(asked)
    low, high = bounds(values)
    return min(max(rounded(asked), low), high)  # a rounded one may lie outside


def _trial(
    space: Mapping[str, Draw],
    kinds: Mapping[str, BaseDistribution],
    values: Point,
    loss: float | None,
) -> FrozenTrial:
    """What was tried, in Optuna's words."""
    from optuna.trial import TrialState, create_trial

    params = {}
    for key, draw in space.items():
        choices = draw.get("choice")
        params[key] = choices.index(values[key]) if isinstance(choices, list) else values[key]
    if loss is not None and not math.isfinite(loss):
        loss = math.inf  # the worst, and no NaN, which it does not take
    state = TrialState.RUNNING if loss is None else TrialState.COMPLETE
    return create_trial(state=state, params=params, distributions=dict(kinds), value=loss)
