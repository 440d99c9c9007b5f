"""A disk that fails at any call: one that is refused, or full from there on. What the log called saved is there, and the run goes on as if nothing had been."""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.torture import writes
from tests.torture.conftest import LAYOUTS, Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.runs.checkpoints import finished, newest_valid, verify
from trainkit.runs.folder import RunFolder

LAST = 6  # steps of the runs here
SAVED = re.compile(r" saved checkpoint (\d+):")
MADE = re.compile(r" iteration +(\d+)/")
KINDS: dict[str, dict[str, Any]] = {
    "ENOSPC": {"do": errno.ENOSPC},
    "EIO": {"do": errno.EIO},
    "half": {"do": "short"},
    "full, room after 2 steps": {"do": errno.ENOSPC, "steps": 2},
    "full for good": {"do": errno.ENOSPC, "steps": 99},
}
LAST_WORD = "attempts/1/heartbeat/RANK.json.tmp"
SILENT = {  # who waits for a lock is not told for whom; the last heartbeat is written where the one before stands
    "ftruncate checkpoints/writer.lock",
    "pwrite checkpoints/writer.lock",
    "fsync attempts/1/heartbeat",
    *(f"{operation} {LAST_WORD}" for operation in ("create", "write", "fsync", "replace")),
}
AGAIN = "the next save tries again"
OUTCOMES = ("nothing lost", "a save left out", "ended before step 1", "ended later", "nobody asked")
SOME = [
    "write checkpoints/step-N.tmp/rank-00000.bin",
    "rename checkpoints/step-N.tmp",
    "rename checkpoints/step-N",
    "fsync checkpoints",
    "pwrite windows.bin",
    "create metrics.jsonl",
    f"fsync {LAST_WORD}",
    "write metrics.jsonl",
    "mkdir checkpoints/step-N.tmp",
]


@dataclass(frozen=True)
class Call:
    """One thing that a rank asked of the disk."""

    number: int
    what: str
    refused: bool


def calls_in(report: Path) -> list[Call]:
    parts = [line.split(" ") for line in report.read_text().splitlines()]
    return [Call(int(number), " ".join(words[:2]), "!" in words) for number, *words in parts]


class Sweep:
    """Runs of one kind, each with another call that fails, against one that is left alone."""

    def __init__(self, layout: str, root: Path, ranks: Ranks, rank: int = 0, *, save_async: bool = False) -> None:
        self.layout, self.root, self.ranks, self.rank, self.save_async, self.begun = layout, root, ranks, rank, save_async, 0
        self.size = LAYOUTS[layout][0]
        whole = self._new_run("whole")
        assert ranks.run(whole, self.size, [self._fault(whole)]) == [0] * self.size, log_of(whole)
        self.expected, self.calls = facts(whole), calls_in(root / "whole/report")
        self.kept = whole_steps(whole)

    def _new_run(self, name: str) -> RunFolder:
        keep = {"keep_last": 1, "keep_every": 4, "save_async": self.save_async}
        return new_run(job_of(self.layout, self.root / name, keep=keep, train_iters=LAST, save_interval=2, eval_interval=3))

    def _fault(self, run: RunFolder, **fault: Any) -> dict[str, Any]:
        return {"at": "writes", "root": str(run.path), "report": str(run.path.parents[2] / "report"), "rank": self.rank, **fault}

    def calls_for(self, kind: str) -> list[Call]:
        """Those that this may happen to, but of many for one place in one step the first and the last; TensorBoard's, by the hundred, as if of one step."""
        may = {"half": writes.IN_PART, "full, room after 2 steps": writes.TAKES_ROOM, "full for good": writes.TAKES_ROOM}.get(kind)
        found: dict[tuple[int, str], list[Call]] = {}
        step = 0
        for call in self.calls:
            step += call.what == "pwrite windows.bin"  # noted as a step begins
            if may is None or call.what.split(" ")[0] in may:
                found.setdefault((0 if "tensorboard" in call.what else step, call.what), []).append(call)
        return [call for group in found.values() for call in dict.fromkeys((group[0], group[-1]))]

    def fail(self, number: int, kind: str) -> str:
        """One run that meets this and is then resumed; what came of it, in the words of the table of docs/checkpoints.md."""
        self.begun += 1
        run = self._new_run(f"broken{self.begun}")
        codes = self.ranks.run(run, self.size, [self._fault(run, call=number, **KINDS[kind])])
        refused = [call.what for call in calls_in(self.root / f"broken{self.begun}/report") if call.refused]
        story = f"{kind} at call {number}, {refused[:1]}: {codes}\n{log_of(run)[-3000:]}"
        came = self._look(run, codes, refused, story)
        if codes[self.rank] != 0:
            assert self.ranks.run(run, self.size) == [0] * self.size, f"resumed after {story}"
        assert facts(run) == self.expected, story
        assert whole_steps(run)[-1] == LAST, story
        shutil.rmtree(self.root / f"broken{self.begun}")
        return came

    def _look(self, run: RunFolder, codes: list[int], refused: list[str], story: str) -> str:
        """What must hold before anything is mended."""
        log, rows = log_of(run), facts(run)
        newest = newest_valid(run.checkpoints, pytest.fail)
        assert (newest.manifest.step if newest else 0) >= max(map(int, SAVED.findall(log)), default=0), story
        assert all(verify(folder) == [] for folder in finished(run.checkpoints)), story
        assert rows == self.expected[: len(rows)], story
        assert codes[self.rank] in (0, 10), story
        if not refused:
            assert codes == [0] * self.size, story
            return "nobody asked"
        if codes[self.rank] == 0:
            assert codes == [0] * self.size, story
            assert "WARNING: " in log or set(refused) <= SILENT or story.startswith("half"), story
            return "a save left out" if AGAIN in log else "nothing lost"
        words = "No space left" if "ENOSPC" in story or "full" in story else "Input/output error"
        assert words in log, story
        error = run.attempt(1).error(self.rank)
        assert not error.exists() or (json.loads(error.read_text())["exit"] == 10 and words in json.loads(error.read_text())["message"]), story
        reached = max(map(int, MADE.findall(log)), default=0)  # rows on disk may be fewer
        assert reached in (0, LAST) or AGAIN in log, story  # in between only the second save in a row that fails ends a run
        return "ended later" if reached else "ended before step 1"


@pytest.mark.timeout(300)
def test_some_calls(ranks: Ranks, tmp_path: Path) -> None:
    """One of each of some places; the slow tests below try all of them."""
    sweep, dice = Sweep("1", tmp_path, ranks), random.Random(1)
    for kind, places in (("ENOSPC", SOME), ("EIO", SOME[:2]), ("half", SOME[:1]), ("full, room after 2 steps", SOME[-2:])):
        for what in places:
            call = dice.choice([call for call in sweep.calls_for(kind) if call.what == what])
            assert sweep.fail(call.number, kind) in OUTCOMES, what


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "rank", "save_async"), [("1", 0, False), ("1", 0, True), ("DP2", 0, False), ("DP2", 1, False)])
def test_every_call(layout: str, rank: int, save_async: bool, kind: str, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of the table of docs/checkpoints.md."""
    sweep = Sweep(layout, tmp_path, ranks, rank, save_async=save_async)
    came = Counter(sweep.fail(call.number, kind) for call in sweep.calls_for(kind))
    saves = "behind training" if save_async else "in its way"
    with capsys.disabled():
        print(f"\n| layout, rank | saves | the disk | calls | {' | '.join(OUTCOMES)} |")
        print(f"| {layout}, {rank} | {saves} | {kind} | {came.total()} | {' | '.join(str(came[outcome]) for outcome in OUTCOMES)} |")
