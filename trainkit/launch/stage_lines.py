"""What is known of the units of a stage while they run, and the lines that say it now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import Freshness

LINE_SECONDS = 10.0  # between two lines


class StageLines:
    """Says verdicts, and now and then how far the units of a stage are.

    Sums are kept up to date change by change: a stage may have 100,000 units.

    Args:
        say: prints one line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.took: dict[str, float] = {}  # seconds that what was made took, by name
        # tokens and bytes of text that were read for it in that time
        self.wrote: dict[str, dict[str, int]] = {}
        self._begin(())

    def _begin(self, units: Sequence[Unit]) -> None:
        self.sizes = {unit.name: max(1, unit.size) for unit in units}
        self.fractions = dict.fromkeys(self.sizes, 0.0)
        self.total = sum(self.sizes.values())
        self.completed = 0.0
        self.undone = len(units)
        self.shards: dict[str, Mapping[str, int]] = {
            unit.name: {} for unit in units if unit.spec.get("do") == "tokens"
        }
        self.shards_done = 0
        self.counts = {"tokens": 0, "text_bytes": 0}
        self.began = time.monotonic()
        self.last_line = self.began
        self.first_tokens: float | None = None

    def verdict(self, verdict: Freshness) -> None:
        """A stage was judged."""
        state = "fresh" if verdict.fresh else "stale"
        self.say(f"{verdict.stage} {verdict.name} is {state} because {verdict.because}")

    def waiting(self, need: Need, holder: str) -> None:
        """Another process makes it."""
        self.say(f"{need.stage} {need.name}: waiting for {holder}, which is making it")

    def started(self, need: Need, units: Sequence[Unit]) -> None:
        """These units are about to run."""
        self._begin(units)

    def counted(self, unit: Unit, counts: Mapping[str, int]) -> None:
        """A unit has written so many "tokens" of so many "text_bytes" by now."""
        if unit.name not in self.shards:
            return
        self.first_tokens = self.first_tokens or time.monotonic()
        for name in self.counts:
            self.counts[name] += counts.get(name, 0) - self.shards[unit.name].get(name, 0)
        self.shards[unit.name] = dict(counts)

    def progress(self, unit: Unit, fraction: float) -> None:
        """A unit has done so much of its work."""
        before = self.fractions.get(unit.name)
        if before is None:
            return
        self.fractions[unit.name] = fraction
        self.completed += self.sizes[unit.name] * (fraction - before)
        if fraction == 1 and before < 1:
            self.undone -= 1
            self.shards_done += unit.name in self.shards
        self.show_progress(unit, time.monotonic())

    def show_progress(self, unit: Unit, now: float) -> None:
        """Say how far the stage is, where the last line is long ago."""
        if now - self.last_line < LINE_SECONDS:
            return
        self.last_line = now
        about = f", {now - self.began:,.0f} s so far"
        if self.completed:
            left = (now - self.began) * (self.total / self.completed - 1)
            about = f", about {left:,.0f} s left"
        share = self.completed / max(1, self.total)
        self.say(f"  {share:.0%} {self.speed(unit, now)}{about}")

    def speed(self, unit: Unit, now: float) -> str:
        """What is done at what speed; a unit's name before any shard has said what it wrote."""
        if self.first_tokens is None:
            return unit.name
        seconds = max(0.1, now - self.first_tokens)
        rates = (
            f"{self.counts['text_bytes'] / 1e6 / seconds:,.1f} MB/s of text,"
            f" {self.counts['tokens'] / 1e6 / seconds:,.2f} million tokens/s"
        )
        return f"{self.shards_done:,}/{len(self.shards):,} shards, {rates}"

    def finished(self, need: Need) -> None:
        """All units of the stage have succeeded, or it was given up."""
        self.took[need.name] = time.monotonic() - self.began
        self.wrote[need.name] = self.counts
        if not self.undone:
            self.say(
                f"  {need.stage}: {len(self.sizes)} units done in {self.took[need.name]:.1f} s"
            )
