"""Brings the stages of a job up to date, wherever their units run; or shows what that would run."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainkit.base.interrupts import raise_interrupt
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job
from trainkit.launch.remote_units import (
    stage_hosts,
    this_machine_in_image,
)
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import (
    StageReporter,
    StageWork,
    missing_units,
    stamps_folder,
    update_stage,
)
from trainkit.stages.in_flight import StillRunning
from trainkit.stages.stamps import Freshness, check_freshness, unit_folder
from trainkit.stages.unit_process import execute_locally

if TYPE_CHECKING:  # every reader of files and sites comes with it
    from trainkit.data.sources.announce import DownloadNotice

Notice = Callable[[str], None]


def refuse_download(announcement: DownloadNotice) -> None:
    """Raise ConfigError (exit 6) for a large download that nobody has accepted in jobs.toml."""
    announcement.check_space()
    if not announcement.accepted:
        raise announcement.refusal()


@dataclass(frozen=True)
class StageUi:
    """How a person follows stages.

    Args:
        reporter: is called as stages are judged and as their units progress.
        say: prints one line.
        agree: is called before a large download begins; raises ConfigError where nobody agrees.
    """

    reporter: StageReporter
    say: Notice
    agree: Callable[[DownloadNotice], None] = refuse_download


class UnitRunner(Protocol):
    """Runs the units of one stage somewhere."""

    @property
    def on_this_machine(self) -> bool:
        """Whether they are processes of this machine."""

    def run(self, work: StageWork) -> None:
        """Run units in the order their `after` asks for and stamp each that succeeds. Raises
        TrainkitError on the first failure."""

    def describe(self, need: Need, units: Sequence[Unit], folder: Path) -> list[str]:
        """Lines that say what would run; nothing is written. `folder`: of specs and scripts."""


class LocalUnits:
    """The units run as processes of this machine."""

    on_this_machine = True
    run = staticmethod(execute_locally)

    def describe(self, need: Need, units: Sequence[Unit], folder: Path) -> list[str]:
        lines = []
        for unit in units:
            lines.append(f"would run {shlex.join(unit.argv)} {unit.name}.spec.json")
            if unit.commands is not None:
                lines += [f"  {shlex.join(argv)}" for argv in unit.commands()]
        return lines


def direct_units(job: Job | None, stage: str, notice: Notice) -> UnitRunner:
    """What runs the units of a stage where no scheduler does: hosts of the cluster's hostfile
    where clusters.X.stages.STAGE asks for them, else this machine; in the job's image where
    containers.X.stages_in_container says so.

    Args:
        job: on whose behalf; None: this machine.
        stage: the stage's name.
        notice: is called with what a person should know.

    Raises ConfigError where the hostfile has fewer hosts than the stage asks for, or only Slurm
    can enter the image.
    """
    if job is None:
        return LocalUnits()
    hosts = stage_hosts(job, stage, notice) or this_machine_in_image(job, stage, notice)
    return hosts or LocalUnits()


@contextlib.contextmanager
def term_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP (a terminal that is closed) end the block as Ctrl-C does: workers are
    stopped, what is half done is undone, finished units stay. Only the main thread can take
    signals; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup ignores SIGHUP, and that stays so
    handled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    former = {number: signal.signal(number, raise_interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Preparation:
    """Brings stages up to date for a person who follows.

    Args:
        root: the folder that holds data/ and stamps/.
        ui: how the person follows.
        runner_of: what runs the units of a stage, by the stage's name.
        in_flight: whether jobs that another run has submitted may still write.
        workers: see `StageWork`.
        force: make what is fresh, too.
    """

    root: Path
    ui: StageUi
    runner_of: Callable[[str], UnitRunner]
    in_flight: StillRunning
    workers: int | None = None
    force: bool = False

    def make(self, needs: Iterable[Need]) -> list[Freshness]:
        """Make every need fresh, each asked for when those before it are done; what was found
        before. Raises TrainkitError as `update_stage`, and what `ui.agree` raises."""
        with term_interrupts():
            return [self._make(need) for need in needs]

    def _make(self, need: Need) -> Freshness:
        runner = self.runner_of(need.stage)
        stamps = stamps_folder(self.root, need.stage)
        lacking = need.lacking if runner.on_this_machine else None
        if (need.announcement is not None or lacking is not None) and not check_freshness(
            need, stamps, force=self.force
        ).fresh:
            if need.announcement is not None:
                self.ui.agree(need.announcement)
            if lacking is not None:  # said before there are workers
                raise lacking
        return update_stage(
            need,
            self.root,
            runner.run,
            self.ui.reporter,
            force=self.force,
            going=self.in_flight,
            workers=self.workers,
        )

    def show(self, needs: Iterable[Need]) -> list[Freshness]:
        """Say of every need whether it is fresh, and what would be run. Nothing is written."""
        verdicts = []
        for need in needs:
            stamps = stamps_folder(self.root, need.stage)
            verdict = check_freshness(need, stamps, force=self.force)
            verdicts.append(verdict)
            self.ui.reporter.verdict(verdict)
            if verdict.fresh:
                continue
            units = missing_units(need, stamps, force=self.force)
            folder = unit_folder(stamps, need.name)
            for line in self.runner_of(need.stage).describe(need, units, folder):
                self.ui.say(f"  {line}")
        return verdicts
