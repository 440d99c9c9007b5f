"""The ledger of a real run on Slurm, each bin beside a clock of the test's own: three kills, a
resume on another layout, a return to a checkpoint, compilation, evaluations and saves."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.drill_clock import (
    BEAT,
    Mark,
    Watch,
    marks_of_rank,
    marks_of_supervisor,
    seconds_of_bins,
    traces,
)
from tests.cluster.machines import HEAD, HERE, Process
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for
from trainkit.reports.ledger import BINS
from trainkit.reports.read import read_report
from trainkit.runs.folder import RunFolder

# where attempt N stands still until it is killed, and where its weights are spoilt
DOES = {"1": {"stand": 9}, "2": {"stand": 17}, "3": {"stand": 23}, "4": {"spoil": 27}}
SAVED = {1: 5, 2: 15, 3: 20}  # the checkpoint that is there by then
TRAINING = """training.compile = true
training.on_nan = "rollback"
checkpoint.save_async = true
"""


@dataclass
class Drill:
    """One run, from its submission to its end.

    Args:
        slurm: the project.
        marks: what the drill saw from outside.
        kills: when each attempt was about to be killed, and when it surely was.
    """

    slurm: SlurmProject
    marks: list[Mark] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)

    @property
    def trace(self) -> Path:
        return self.slurm.path / "trace"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.slurm.runs()[0])

    def prepare(self) -> None:
        """A job that waits in the queue; programs on the nodes that are traced, and a sbatch that
        says when it had the job."""
        slurm = self.slurm
        slurm.slurm(hold=True)
        text = (slurm.path / "jobs.toml").read_text().replace("nodes = 2\n", "nodes = 1\n")
        text = text.replace("eval_interval = 10\n", f"eval_interval = 4\n{TRAINING}")
        (slurm.path / "jobs.toml").write_text(text)
        self.trace.mkdir()
        (self.trace / "does.json").write_text(json.dumps(DOES))
        (slurm.path / "python").write_text(f"""#!/bin/bash
case " $* " in *"/trainkit/train/main.py "*|*"/trainkit/launch/main.py "*)
    exec {sys.executable} -I {HERE / "traced_program.py"} {self.trace} "$@";;
esac
exec {sys.executable} "$@"
""")
        (slurm.path / "bin").mkdir()
        sbatch = slurm.path / "bin" / "sbatch"
        real = shutil.which("sbatch")
        sbatch.write_text(
            f'#!/bin/bash\n{real} "$@" || exit\necho "$EPOCHREALTIME" >> {self.trace}/submitted\n'
        )
        sbatch.chmod(0o755)

    def submit(self, *words: str) -> None:
        """Give the run to Slurm, which holds it for a while."""
        path = f"{self.slurm.path}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        process = self.slurm.start(*words, "--detach", PATH=path)
        out, err = process.communicate()
        assert process.returncode == 0, out + err
        time.sleep(1.0)
        self.slurm.cluster.on(
            HEAD, "scontrol", "release", self.slurm.slurm_jobs(self.run.path)[-1]["id"]
        )

    def stands(self, attempt: int) -> None:
        """Wait until rank 0 of an attempt stands still, and what it has saved is there."""
        wait_for(
            lambda: self.rank_of(attempt, "stands"), f"attempt {attempt} to stand", timeout=HANGS
        )
        manifest = self.run.checkpoints / f"step-{SAVED[attempt]:08d}" / "manifest.json"
        wait_for(manifest.exists, f"{manifest}", timeout=HANGS)

    def rank_of(self, attempt: int, what: str) -> bool:
        return any(
            lines[0] | {"at": 0} == {"at": 0, "what": "attempt", "step": attempt, "seconds": 0.0}
            and any(line["what"] == what for line in lines)
            for lines in traces(self.trace)
        )

    def kill(self, *processes: Process) -> None:
        began = time.monotonic()
        self.slurm.cluster.kill(*processes)
        self.kills.append((began, time.monotonic()))

    def processes(self, program: str) -> list[Process]:
        found = self.slurm.cluster.processes_of(self.run.id)
        return [each for each in found if any(program in word for word in each.argv)]


@pytest.fixture
def drill(slurm: SlurmProject) -> Iterator[Drill]:
    found = Drill(slurm)
    found.prepare()
    yield found


def submitted_at(drill: Drill) -> list[float]:
    """When sbatch had each job, by time.monotonic()."""
    ahead = time.time() - time.monotonic()
    lines = (drill.trace / "submitted").read_text().split()
    return [float(line) - ahead for line in lines]


def go_through(drill: Drill) -> Watch:
    """The run: killed with its supervisor, resumed on another layout, killed twice more."""
    slurm = drill.slurm
    runs = slurm.path / "runs" / "random"

    def jobs(number: int) -> bool:
        return any(
            len(slurm.slurm_jobs(p.parents[1])) >= number for p in runs.glob("*/launch/slurm.json")
        )

    watch = Watch(
        {
            "folder": lambda: any(runs.glob("*")),
            "code": (slurm.path / "code").exists,
            "job 1": lambda: jobs(1),
            "job 2": lambda: jobs(2),
        }
    )
    drill.submit("train", "random")
    drill.stands(1)
    everything = drill.processes("")
    drill.kill(*sorted(everything, key=lambda each: "/launch/main.py" not in " ".join(each.argv)))
    slurm.wait_state(drill.run.path, "failed")
    wait_for(lambda: not slurm.jobs(), "Slurm to end the job", timeout=HANGS)
    layout = ("--set", "cluster.ranks_per_node=1", "--set", "training.compile=false")
    drill.submit("resume", "last", *layout)
    for attempt in (2, 3):
        drill.stands(attempt)
        (rank,) = drill.processes("/train/main.py")
        drill.kill(rank)
    slurm.wait_state(drill.run.path, "succeeded")
    watch.close()
    return watch


def marks_of(drill: Drill, watch: Watch) -> list[Mark]:
    """All boundaries of the run."""
    submitted = submitted_at(drill)
    marks = [
        Mark(watch.absent["folder"], watch.seen["code"], "start"),
        Mark(submitted[0] - 0.001, watch.seen["job 1"], "queue"),
        Mark(submitted[1] - 0.001, watch.seen["job 2"], "queue"),
    ]
    supervisors = [lines for lines in traces(drill.trace) if lines[0]["what"] != "attempt"]
    for lines in supervisors:
        marks += marks_of_supervisor(lines)
    ranks = [lines for lines in traces(drill.trace) if lines[0]["what"] == "attempt"]
    for lines in ranks:
        attempt = lines[0]["step"]
        late = -slurm_offset(drill, attempt)
        found = marks_of_rank(lines, late, compiled=attempt == 1)
        if attempt == 1:
            found = last_seen(found, lines, drill.kills[0][1])
        marks += found
    ends = [
        line["at"]
        for line in supervisors[1]
        if line["what"] == "leave rank_ended" and line["rank"] == 0
    ]
    for kill, end in zip(drill.kills[1:], ends, strict=False):
        marks.append(Mark(kill[0], end, "idle"))
    return marks


def last_seen(marks: Sequence[Mark], lines: Sequence[dict[str, Any]], killed: float) -> list[Mark]:
    """The marks of an attempt whose supervisor was killed too, with its end: the last change of
    what it did, or the last beat, one in half a second; the very last may not have been written."""
    kept = list(marks)
    while kept[-1].bin == kept[-2].bin:
        kept.pop()
    beats = [float(line["at"]) for line in lines if line["what"] in ("work", "stands")]
    return [*kept, Mark(max(beats[-2] - BEAT, kept[-1].latest), killed, "idle")]


def slurm_offset(drill: Drill, attempt: int) -> float:
    """Seconds that the run takes a node's clock to be ahead: all have the same, so that it is
    the way of a message, which comes late."""
    return float(drill.slurm.events(drill.run.path, attempt)["agent_joined"]["clock_offset"])


@pytest.mark.slow  # four attempts with a torch of their own, and one compilation
def test_each_bin_is_right_by_another_clock(drill: Drill) -> None:
    ahead = time.time() - time.monotonic()
    watch = go_through(drill)
    marks = marks_of(drill, watch)
    stepped = abs(time.time() - time.monotonic() - ahead)  # somebody has set the machine's clock
    expected = seconds_of_bins(marks)
    ledger = read_report(drill.run).ledger
    for bin in BINS:
        low, high = expected.get(bin, (0.0, 0.0))
        print(f"{bin:12} {ledger.seconds[bin]:9.4f} s by the ledger, {low:9.4f} to {high:9.4f}")
    assert not ledger.notes
    assert set(expected) == set(BINS)
    for bin in BINS:
        low, high = expected[bin]
        assert low - stepped <= ledger.seconds[bin] <= high + stepped, bin
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-9)
    ordered = sorted(marks, key=lambda mark: mark.earliest)
    wall = ordered[-1].earliest - ordered[0].latest, ordered[-1].latest - ordered[0].earliest
    assert wall[0] - stepped <= ledger.wall_seconds <= wall[1] + stepped
    print(
        f"wall clock   {ledger.wall_seconds:9.4f} s by the ledger, {wall[0]:9.4f} to {wall[1]:9.4f}"
    )
