"""The progress bar of pytorch-lightning, read from its first line to its last: what a line means
depends on those before it."""

from __future__ import annotations

import time
from typing import Callable

from trainkit.engines.rank.nemo import (
    BarLine,
    as_tqdm,
    iteration_line,
    iteration_of,
    read_bar,
    read_validation,
)
from trainkit.engines.rank.printed import to_float
from trainkit.engines.rank.readings import EvaluationLine, Reading
from trainkit.engines.rank.spec import RankSpec


class NemoLines:
    """The lines of one process.

    The bar is drawn after each iteration; every log interval is a row. Its own speed is not good:
    after a resume it counts the iterations of earlier attempts too. `val_loss` stays in the bar,
    and the bar is drawn with the old one while a validation runs.

    Args:
        spec: of the rank.
        clock: seconds, to measure iterations by.
    """

    def __init__(self, spec: RankSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.clock = clock
        self.step: int | None = None
        self._count = -1
        self._base: tuple[int, float] | None = None  # where time is measured from
        self._validating = False
        self._validated = False
        self._val_loss: str | None = None

    def read(self, text: str) -> list[Reading]:
        """What one line says: an iteration, an evaluation, both or nothing."""
        validation = read_validation(text)
        if validation is not None:
            done, batches = validation
            self._validating = True
            self._validated = done == batches
            return []
        bar = read_bar(text)
        if bar is None:
            return []
        step = self._step_of(bar)
        return self._evaluation(bar, step) + self._iteration(bar, step)

    def _step_of(self, bar: BarLine) -> int | None:
        """The iteration. Where tqdm rounds it, the count says it: drawn first beside what the
        iteration before said, then beside its own. Of a count that has batches of validations in
        it these are taken off."""
        drawn_again = bar.count == self._count
        self._count = bar.count
        step = iteration_of(bar)
        said = bar.said.get("global_step", "")
        interval = self.spec.eval_interval
        if step is None or "e" not in said:
            return step
        if not drawn_again:
            return None
        if step == bar.count or not interval:
            return step
        whole, rest = divmod(bar.count - 1, interval + self.spec.eval_iters)
        exact = whole * interval + min(rest, interval - 1) + 1
        return exact if as_tqdm(exact - 1) == said else step

    def _evaluation(self, bar: BarLine, step: int | None) -> list[Reading]:
        said = bar.said.get("val_loss")
        if not self._validated:
            if not self._validating:
                self._val_loss = said
            return []
        later = step is not None and self.step is not None and step > self.step
        if said is None or (said == self._val_loss and not later):
            return []
        self._validated = False
        self._val_loss = said
        return [EvaluationLine(self.step, "valid", to_float(said))]

    def _iteration(self, bar: BarLine, step: int | None) -> list[Reading]:
        if step is None or (self.step is not None and step <= self.step):
            return []
        now = self.clock()
        first = self.step is None
        self.step = step
        if self._validating or self._base is None:
            self._validating = False
            self._validated = False
            base = (step, now)
        else:
            base = self._base
        due = first or step % self.spec.log_interval == 0 or step >= self.spec.train_iters
        if not due:
            self._base = base
            return []
        self._base = (step, now)
        elapsed = None
        if step > base[0]:
            elapsed = (now - base[1]) * 1000.0 / (step - base[0])
        found = iteration_line(bar, step, elapsed)
        return [] if found is None else [found]
