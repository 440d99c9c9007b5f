"""What a person sees while things run: stage verdicts, unit bars, the training bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsTail
from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import Verdict

LINE_SECONDS = 10.0  # between lines where there is no terminal for a bar


class StageReporter:
    """Prints verdicts; draws one bar over the units of a stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.sizes: dict[str, int] = {}
        self.done: dict[str, float] = {}
        self.began = 0.0

    def verdict(self, verdict: Verdict) -> None:
        mark = "[green]fresh[/]" if verdict.fresh else "[yellow]stale[/]"
        self.console.print(f"{verdict.stage} [bold]{verdict.name}[/] is {mark} because {escape(verdict.because)}")

    def waiting(self, need: Need, holder: str) -> None:
        self.console.print(f"{need.stage} [bold]{need.name}[/]: waiting for {escape(holder)}, which is making it")

    def started(self, need: Need, units: Sequence[Unit]) -> None:
        self.sizes = {u.name: max(1, u.size) for u in units}
        self.done = dict.fromkeys(self.sizes, 0.0)
        self.began = time.monotonic()
        bar = TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
        self.bar = Progress(*bar, console=self.console, transient=True)
        self.bar.add_task(need.stage, total=sum(self.sizes.values()))
        if self.console.is_terminal:
            self.bar.start()

    def progress(self, unit: Unit, fraction: float) -> None:
        if self.bar is None:
            return
        self.done[unit.name] = fraction
        working = next((n for n, f in self.done.items() if 0 < f < 1), unit.name)
        self.bar.update(self.bar.task_ids[0], completed=sum(self.sizes[n] * f for n, f in self.done.items()), description=working)

    def finished(self, need: Need) -> None:
        if self.bar is not None and self.bar.live.is_started:
            self.bar.stop()
        self.bar = None
        if all(f == 1 for f in self.done.values()):
            self.console.print(f"  {need.stage}: {len(self.done)} units done in {time.monotonic() - self.began:.1f} s")


def _shown(loss: float | None) -> str:
    """A loss for people; metrics hold null where it is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


class TrainingView:
    """Follows metrics.jsonl of a run: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console, train_iters: int) -> None:
        self.console, self.train_iters = console, train_iters
        self.tail: MetricsTail | None = None
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.last_look = 0.0

    def begin(self, run: RunFolder) -> None:
        """Start following; called before the ranks start. What an earlier attempt has logged is not told again."""
        self.tail = MetricsTail(run.metrics)
        self.tail.new_rows()
        self.console.print(f"run [bold]{run.id}[/] in {escape(str(run.path))}")
        columns = TextColumn("[bold]train[/]"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console)
        self.bar.add_task("starting the ranks", total=self.train_iters)
        if self.console.is_terminal:
            self.bar.start()

    def tick(self) -> None:
        """Take in new rows, at most some times a second."""
        now = time.monotonic()
        if self.tail is None or self.bar is None or now - self.last_look < 0.2:
            return
        self.last_look = now
        for row in self.tail.new_rows():
            if "eval" in row:
                self.console.print(f"  step {row['step']}: {row['eval']} loss {_shown(row['lm_loss'])}")
                continue
            text = f"loss {_shown(row['lm_loss'])}  {row['tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.bar.task_ids[0], completed=row["step"], description=text)
            if not self.console.is_terminal and (now - self.last_line > LINE_SECONDS or row["step"] == self.train_iters):
                self.last_line = now
                self.console.print(f"  step {row['step']}/{self.train_iters}  {text}")

    def notice(self, text: str) -> None:
        """A line that must not be lost in the bar."""
        self.console.print(f"[yellow]{escape(text)}[/]")

    def end(self) -> None:
        """Take in the last rows and take the bar away."""
        self.last_look = 0.0
        with contextlib.suppress(OSError, SystemExit):  # the terminal may be gone
            self.tick()
            if self.bar is not None and self.bar.live.is_started:
                self.bar.stop()
