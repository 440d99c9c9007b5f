"""Kills at any moment: a whole checkpoint is always there, at most one interval is lost, and the
losses, weights and moments are those of a run that nobody touched."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.torture.conftest import LAYOUTS, PRECISIONS, SAVE_INTERVAL, Ranks, job_of
from tests.torture.faults import ON_RANK_0, Fault
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.checkpoints import (
    newest_valid,
    open_checkpoint,
    published_folders,
    step_of,
    verify,
)
from trainkit.runs.folder import RunFolder

PLACES = (
    "step",
    "eval",
    "prepare",
    "write",
    "load",
    "byte",
    "manifest",
    "publish",
    "prune",
    "delete",
    "time",
)


def fault_of(at: str, dice: random.Random, layout: str) -> Fault:
    """One kill at a place, on a random rank, alone or with all others."""
    rank = 0 if at in ON_RANK_0 else dice.randrange(LAYOUTS[layout].ranks)
    fault: Fault = {
        "do": "kill",
        "at": at,
        "rank": rank,
        "all": dice.random() < 0.5,
        "call": 1 if at == "load" else dice.choice((1, 1, 2)),
        "when": dice.choice(("before", "after")),
    }
    return fault | ({"byte": dice.randrange(20_000)} if at == "byte" else {})


def kill_later(run: RunFolder, step: int, seconds: float, victims: slice) -> Any:
    """So long after it has reported a step: after its start alone, a machine that is slow at times
    would be done before, again and again."""

    def during(pids: list[int]) -> None:
        while (steps(run) or [0])[-1] < step and Path(f"/proc/{pids[0]}").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        for pid in pids[victims]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)

    return during


def end_of(run: RunFolder) -> Any:
    """What its last checkpoint holds: the hash of every file of weights and moments, and state."""
    manifest = open_checkpoint(published_folders(run.checkpoints)[-1]).manifest
    return manifest.step, manifest.files, manifest.tensors, manifest.state


@dataclass
class Tally:
    """What came of the kills, by place."""

    kills: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.kills.values())


class Torture:
    """Runs of one layout under fire, against one that is left alone."""

    def __init__(
        self,
        layout: str,
        root: Path,
        ranks: Ranks,
        seed: int,
        *,
        save_async: bool = False,
        precision: str = "fp32",
    ) -> None:
        self.layout, self.root, self.ranks, self.dice, self.save_async = (
            layout,
            root,
            ranks,
            random.Random(seed),
            save_async,
        )
        self.precision = precision
        self.size, self.tally, self.begun = LAYOUTS[layout].ranks, Tally(), 0
        whole = self._new_run("whole")
        assert ranks.run(whole, self.size) == [0] * self.size, whole.attempt(1).log(0).read_text()
        self.expected = facts(whole), end_of(whole)
        assert steps(whole) == list(range(1, 13))
        chances = [
            open_checkpoint(p).manifest.state.get("hysteresis_tracker", 0)
            for p in published_folders(whole.checkpoints)
        ]
        assert (min(chances) < 0) == (precision == "fp16"), chances

    def _new_run(self, name: str) -> RunFolder:
        return new_run(
            job_of(
                self.layout,
                self.root / name,
                keep={"save_async": self.save_async},
                precision=self.precision,
            )
        )

    def kill_at(self, places: list[str]) -> None:
        """A run that is killed at each of these places one after the other, then left alone to
        end. Where a place never comes, the run ends, and the next one goes on with the list."""
        run = self._next_run()
        for at in places:
            if at == "time":
                victims = self.dice.choice((slice(None), slice(0, 1), slice(-1, None)))
                step = self.dice.randrange(12)
                seconds = self.dice.uniform(0, 0.2)  # one step, or the start
                codes = self.ranks.run(
                    run, self.size, during=kill_later(run, step, seconds, victims)
                )
            else:
                codes = self.ranks.run(run, self.size, [fault_of(at, self.dice, self.layout)])
            if codes == [0] * self.size:
                self._check_end(run)
                run = self._next_run()
                continue
            assert -signal.SIGKILL in codes, (at, codes, run.attempt(1).log(0).read_text()[-3000:])
            self._look(run, at)
        assert self.ranks.run(run, self.size) == [0] * self.size, (
            run.attempt(1).log(0).read_text()[-3000:]
        )
        self._check_end(run)

    def _next_run(self) -> RunFolder:
        self.begun += 1
        return self._new_run(f"broken{self.begun}")

    def _check_end(self, run: RunFolder) -> None:
        assert (facts(run), end_of(run)) == self.expected
        assert not list(run.checkpoints.glob("*.tmp"))
        assert [step_of(p) for p in published_folders(run.checkpoints)][-2:] == [9, 12] and all(
            verify(p) == [] for p in published_folders(run.checkpoints)
        )

    def _look(self, run: RunFolder, at: str) -> None:
        reached = (steps(run) or [0])[-1]
        newest = newest_valid(run.checkpoints, pytest.fail)
        lost = reached - (newest.manifest.step if newest else 0)
        assert lost <= SAVE_INTERVAL * (2 if self.save_async else 1), (
            f"{lost} steps lost by a kill at {at}"
        )
        self.tally.kills[at] += 1
        self.tally.lost[at] = max(self.tally.lost[at], lost)


FEW = [
    ("1", "fp32", False, 5),
    ("DP2", "fp32", False, 5),
    ("DP2", "fp16", True, 3),
    ("TP2", "bf16", False, 2),
    ("TP2 x PP2", "fp16", False, 2),
    ("HSDP 2x2 ZeRO 3, Muon", "bf16", True, 2),
    ("TP2 + SP, EP2, Muon", "fp16", False, 2),
    ("PP2 ZBV, Muon", "fp32", False, 2),
    ("DP2, EP2", "fp32", False, 3),
]
FEW = [few for few in FEW if few[0] in LAYOUTS]
FEWEST = {"DP2", "TP2 x PP2", "PP2 ZBV, Muon"}  # each kind of layout, saves behind training too

WITH_MUON = [name for name in LAYOUTS if name.endswith("Muon")]
MANY = [
    *itertools.product([name for name in LAYOUTS if name not in WITH_MUON], PRECISIONS),
    *zip(WITH_MUON, itertools.cycle(PRECISIONS), strict=False),
]


@pytest.mark.parametrize(
    ("layout", "precision", "save_async", "kills"),
    [few if few[0] in FEWEST else pytest.param(*few, marks=pytest.mark.slow) for few in FEW],
)
def test_kills(
    layout: str, precision: str, save_async: bool, kills: int, ranks: Ranks, tmp_path: Path
) -> None:
    torture = Torture(
        layout, tmp_path, ranks, seed=kills, save_async=save_async, precision=precision
    )
    places = [place for place in PLACES if place != "load"]
    torture.dice.shuffle(places)
    while torture.tally.total < kills:
        missing = kills - torture.tally.total
        torture.kill_at([places[(torture.tally.total + i) % len(places)] for i in range(missing)])


@pytest.mark.slow
@pytest.mark.timeout(7200)  # against hanging
@pytest.mark.parametrize(("layout", "precision"), MANY)
def test_twenty_and_more_kills(
    layout: str, precision: str, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at each place in each layout and precision, five hundred in all: a row each of the
    table of docs/checkpoints.md."""
    number = list(LAYOUTS).index(layout) + list(PRECISIONS).index(precision)
    torture = Torture(
        layout, tmp_path, ranks, seed=number, save_async=number % 2 == 1, precision=precision
    )
    places = [*PLACES, *PLACES]
    while torture.tally.total < 20 or places:
        chosen, places = places[:4] or torture.dice.sample(PLACES, 4), places[4:]
        torture.kill_at(chosen)
    counts = " | ".join(str(torture.tally.kills[place]) for place in PLACES)
    how = "behind training" if torture.save_async else "in its way"
    with capsys.disabled():
        print(f"\n| layout | precision | saves | kills | {' | '.join(PLACES)} | most steps lost |")
        print(
            f"| {layout} | {precision} | {how} | {torture.tally.total} | {counts} |"
            f" {max(torture.tally.lost.values())} |"
        )
