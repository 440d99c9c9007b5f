"""Where the time of a run went: every second between its submission and its end in one bin.

The boundaries are what was written when it happened: the supervisor's events, and rank 0's changes
of phase (trainkit/runs/phases.py). Two spans never overlap and none is left out, so the bins sum to
the wall clock. docs/reports.md says what counts as what. A page shows it as a bar of sums,
a bar over time and a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.reports.chart import text
from trainkit.reports.words import duration
from trainkit.runs.phases import PhaseChange

Bin = Literal[
    "queue", "start", "compile", "training", "data", "checkpoint", "evaluation", "lost", "idle"
]
BINS: tuple[Bin, ...] = get_args(Bin)
WORDS: dict[Bin, str] = {
    "queue": "waiting in the queue",
    "start": "starting",
    "compile": "compiling",
    "training": "training",
    "data": "waiting for data",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "lost": "lost and redone",
    "idle": "idle",
}
_BIN_OF_PHASE: dict[str, Bin] = {
    "compile": "compile",
    "compile_eval": "compile",
    "again": "training",
    "train": "training",
    "eval": "evaluation",
    "save": "checkpoint",
    "load": "checkpoint",  # going back to a checkpoint; the first load is part of the start
}
STEPS = ("compile", "again", "train")
WORK = (*STEPS, "compile_eval", "eval", "save")


@dataclass(frozen=True)
class Span:
    """A stretch of time in one bin.

    Args:
        begin: seconds since 1970.
        end: as well.
        bin: what it counts as.
        attempt: in which; 0: before the first.
        phase: rank 0's, "" where it had none.
        step: optimizer steps done at its begin.
        cut: it was ended by the end of the ranks, not by another phase.
        data_seconds: of it, waiting for data.
        checkpoint_seconds: of it, waiting for a checkpoint.
        sign: a later moment, and the steps that were done by then.
    """

    begin: float
    end: float
    bin: Bin
    attempt: int = 0
    phase: str = ""
    step: int = 0
    cut: bool = False
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    sign: tuple[float, int] = (0.0, 0)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def time_of(self, step: int) -> float:
        """When so many steps were done, if all of them took equally long."""
        later, done = self.sign
        if step <= self.step:
            return self.begin
        if done <= self.step:
            return self.end
        pace = (later - self.begin) / (done - self.step)
        return min(max(self.begin, self.begin + pace * (step - self.step)), self.end)


@dataclass(frozen=True)
class Fault:
    """What an attempt failed of.

    Args:
        what: in words.
        failure_class: infra, hang and so on.
        time: when it happened, by the supervisor's clock.
        known: when it was decided to stop what still ran.
        step: the furthest step of any rank.
    """

    what: str
    failure_class: str
    time: float
    known: float
    step: int


@dataclass(frozen=True)
class AttemptTimes:
    """What is known of one attempt's time, by the supervisor's clock in seconds since 1970.

    Args:
        number: its number.
        started: when its supervisor began it.
        ranks_ended: when rank 0 ended, or gave its last sign of life.
        ended: when the attempt ended, or gave its last sign of life.
        go: when all ranks ran; None where they never did.
        phases: rank 0's.
        requeued: Slurm put the job back into its queue afterwards.
        sign: rank 0's last sign of life, and its step then.
        fault: what it failed of; None where it did not.
        source: what it went on from: disk, memory or partner.
    """

    number: int
    started: float
    ranks_ended: float
    ended: float
    go: float | None = None
    phases: Sequence[PhaseChange] = ()
    requeued: bool = False
    sign: tuple[float, int] = (0.0, 0)
    fault: Fault | None = None
    source: str = "disk"

    @property
    def resumed_at(self) -> int | None:
        """The step that its training went on from; None where it did not come so far."""
        return next((each.step for each in self.phases if each.phase in STEPS), None)


@dataclass(frozen=True)
class RunTimes:
    """What is known of a run's time.

    Args:
        submitted: when a person or a script asked for it.
        end: when it ended; for one that has not, now.
        attempts: in order.
        queued_at: when each of its Slurm jobs was submitted.
        kept_step: the newest step that is not lost, of a run that has ended without success; None
            for any other.
    """

    submitted: float
    end: float
    attempts: Sequence[AttemptTimes] = ()
    queued_at: Sequence[float] = ()
    kept_step: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The spans, oldest first, and seconds by bin."""

    spans: Sequence[Span]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def wall_seconds(self) -> float:
        """From submission to end."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    @property
    def seconds(self) -> dict[Bin, float]:
        """By bin; every bin is there."""
        total: dict[Bin, float] = dict.fromkeys(BINS, 0.0)
        for span in self.spans:
            waited = 0.0
            saved = 0.0
            if span.bin == "training":
                waited = min(span.data_seconds, span.seconds)
                saved = min(span.checkpoint_seconds, span.seconds - waited)
            total[span.bin] += span.seconds - waited - saved
            total["data"] += waited
            total["checkpoint"] += saved
        return total

    @property
    def goodput(self) -> float | None:
        """The part of the wall clock that went into steps which were kept; None without time, and
        where notes say that not all of it is known."""
        if not self.wall_seconds or self.notes:
            return None
        return self.seconds["training"] / self.wall_seconds

    def to_json(self) -> dict[str, object]:
        """The key `ledger` of report/1."""
        return {
            "wall_seconds": self.wall_seconds,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "notes": list(self.notes),
        }


class _Builder:
    """Lays spans end to end: whatever clocks say, none overlaps the one before."""

    def __init__(self, begin: float, end: float) -> None:
        self.now = begin
        self.limit = max(begin, end)
        self.spans: list[Span] = []

    def until(self, time: float, span: Span) -> None:
        """What `span` says goes on until `time`; its own times do not count."""
        end = min(max(time, self.now), self.limit)
        if end > self.now:
            self.spans.append(replace(span, begin=self.now, end=end))
        self.now = end


def build_ledger(times: RunTimes) -> Ledger:
    """The ledger of a run."""
    builder = _Builder(times.submitted, times.end)
    notes = []
    requeued = False
    for number, attempt in enumerate(times.attempts):
        _before(builder, times, attempt, first=number == 0, requeued=requeued)
        _attempt(builder, attempt)
        requeued = attempt.requeued
        if attempt.go is not None and not attempt.phases:
            notes.append(
                f"attempt {attempt.number} did not record what its ranks did: all of their time"
                " counts as training"
            )
    _after(builder, times, requeued=requeued)
    return Ledger(_mark_lost(builder.spans, times.kept_step), notes)


def _blank(bin: Bin, attempt: int = 0) -> Span:
    return Span(0.0, 0.0, bin, attempt)


def _before(
    builder: _Builder, times: RunTimes, attempt: AttemptTimes, *, first: bool, requeued: bool
) -> None:
    """The time between an attempt and what was before it."""
    queued = [at for at in times.queued_at if builder.now <= at <= attempt.started]
    if requeued:
        builder.until(attempt.started, _blank("queue", attempt.number))
    elif queued:
        builder.until(queued[0], _blank("start" if first else "idle", attempt.number))
        builder.until(attempt.started, _blank("queue", attempt.number))
    else:
        builder.until(attempt.started, _blank("start" if first else "idle", attempt.number))


def _after(builder: _Builder, times: RunTimes, *, requeued: bool) -> None:
    """The time after the last attempt: of a run that waits, or of one that never began."""
    waiting = [at for at in times.queued_at if at >= builder.now]
    bin: Bin = "idle" if times.attempts else "start"
    if requeued:
        bin = "queue"
    elif waiting:
        builder.until(waiting[0], _blank(bin))
        bin = "queue"
    builder.until(times.end, _blank(bin))


def _attempt(builder: _Builder, attempt: AttemptTimes) -> None:
    number = attempt.number
    phases = list(attempt.phases)
    first = next((i for i, each in enumerate(phases) if each.phase in WORK), len(phases))
    if not phases and attempt.go is not None:
        builder.until(attempt.go, _blank("start", number))
        builder.until(attempt.ranks_ended, _blank("training", number))
    for index in range(first, len(phases)):
        change = phases[index]
        builder.until(change.time, _blank("start", number))  # what is before the first one
        if change.phase == "done":
            break
        following = phases[index + 1] if index + 1 < len(phases) else None
        waited = 0.0
        saved = 0.0
        if following is not None:
            waited = max(0.0, following.data_seconds - change.data_seconds)
            saved = max(0.0, following.checkpoint_seconds - change.checkpoint_seconds)
        span = Span(
            0.0,
            0.0,
            _BIN_OF_PHASE.get(change.phase, "start"),
            number,
            change.phase,
            change.step,
            following is None,
            waited,
            saved,
            attempt.sign if following is None else (following.time, following.step),
        )
        builder.until(attempt.ranks_ended if following is None else following.time, span)
    if first == len(phases):
        builder.until(attempt.ranks_ended, _blank("start", number))
    builder.until(attempt.ended, _blank("idle", number))


def _mark_lost(spans: Iterable[Span], kept_step: int | None) -> list[Span]:
    """The spans with those as lost whose steps were made again, or are gone with their attempt.

    Whenever training begins again at a step, what was done beyond that step before is lost.
    """
    done: list[Span] = []
    again = True
    attempt = 0
    for span in spans:
        again = again or span.attempt != attempt or span.phase == "load"
        attempt = span.attempt
        if again and span.phase in WORK:
            done = [part for each in done for part in _lost_beyond(each, span.step)]
            again = False
        done.append(span)
    if kept_step is not None:
        done = [part for each in done for part in _lost_beyond(each, kept_step)]
    return done


def _lost_beyond(span: Span, step: int) -> Iterator[Span]:
    """The span, lost where training went on from `step` and what it did lies beyond."""
    if span.phase not in STEPS:
        gone = span.phase in WORK and span.step > step
        yield replace(span, bin="lost") if gone else span
        return
    at = span.time_of(step)
    kept = (at - span.begin) / span.seconds
    if kept > 0:
        yield _part(span, span.begin, at, kept)
    if kept < 1:
        yield replace(_part(span, at, span.end, 1 - kept), step=max(span.step, step), bin="lost")


def _part(span: Span, begin: float, end: float, share: float) -> Span:
    """A stretch of a span, with its share of what the span waited for."""
    return replace(
        span,
        begin=begin,
        end=end,
        data_seconds=share * span.data_seconds,
        checkpoint_seconds=share * span.checkpoint_seconds,
    )


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
