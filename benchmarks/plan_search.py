"""Claim: `plan JOB --search` on a CPU machine picks a layout of a demo-sized job that takes at most
a tenth longer than the fastest one measured, on 1, 2 and 4 ranks.

    taskset -c 0,1 python benchmarks/plan_search.py [--ranks 1 2 4] [--rounds 3] [--rows FILE]
        [--lock FILE] [--print]

For each number of ranks: searches all layouts, then trains, by `invoke train`, the first few, the
best of every pair of tensor and pipeline degrees, and some of the rest, each a few steps a round,
in an order that turns round every second time. A layout's time is the median over all of its steps
that count, since other work on the machine comes and goes. `calibrated` is what `plan` says of a
layout after a run of the first choice: the model's time, corrected by that run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainkit.cli.checkout.machine import describe, machine
from trainkit.engines.registry import ENGINES
from trainkit.jobs.load import load
from trainkit.plan.checks import PP, SCHEDULE, TP, VIRTUAL
from trainkit.plan.search import Ranked, Searcher, describe as describe_layout

WARM = 2  # steps that are not counted
STEPS = 6
FIRST = 2  # choices that are trained
OTHERS = (0.4, 0.9)  # of the rest, where in the order
LIMIT = 0.1
SMALL = 2
JOBS_TOML = f"""
[clusters.here]
launcher = "local"
device = "cpu"
ranks_per_node = 2

[models.demo]
family = "gpt"
num_layers = 4
hidden_size = 256
num_attention_heads = 4
seq_length = 128
vocab_size = 4096

[jobs.demo]
cluster = "here"
model = "demo"
dataset = "mock"

[jobs.demo.training]
micro_batch_size = 2
global_batch_size = 16
train_iters = {STEPS}
lr = 1e-3
eval_iters = 0
"""


@dataclass(frozen=True)
class Candidate:
    """A layout that is trained: its place in the search's order, and seconds of the model."""

    ranks: int
    place: int
    name: str
    sets: tuple[str, ...]
    predicted: float


def chosen(ranked: Sequence[Ranked], ranks: int) -> list[Candidate]:
    """The layouts that are trained, in the search's order. Of those that are predicted alike (on
    one rank every ZeRO stage) the first."""
    unlike: dict[str, int] = {}
    for place, found in enumerate(ranked):
        unlike.setdefault(f"{found.seconds:.3g}", place)
    distinct = list(unlike.values())
    places = set(distinct[:FIRST])
    kinds: dict[object, int] = {}
    for place, found in enumerate(ranked):
        kinds.setdefault(kind_of(found, ranks), place)
    places |= set(kinds.values())
    places |= {distinct[int(part * (len(distinct) - 1))] for part in OTHERS}
    made = []
    for place in sorted(places):
        found = ranked[place]
        sets = tuple(f"{path}={json.dumps(value)}" for path, value in found.change.items())
        name = describe_layout(found.change)
        made.append(Candidate(ranks, place + 1, name, sets, found.seconds))
    return made


def kind_of(found: Ranked, ranks: int) -> object:
    """Tensor and pipeline degrees; on two ranks the schedule as well."""
    change = found.change
    schedule = (change.get(SCHEDULE), change.get(VIRTUAL)) if ranks == SMALL else ()
    return change[TP], change[PP], schedule


def candidates_of(folder: Path, ranks: int) -> list[Candidate]:
    """Those of the demo on so many ranks."""
    job = load(folder, {}).resolve("demo", [f"cluster.ranks_per_node={ranks}"]).job
    vocab = job.model.vocab_size
    assert vocab
    found = Searcher(job, ENGINES[job.engine].rules, vocab, cores=cores_here()).search(
        [1], top=10**6
    )
    return chosen(found.ranked, ranks)


def cores_here() -> int:
    return machine().cores


@contextlib.contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """While another benchmark on this machine waits."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def train(folder: Path, layout: Candidate) -> list[float]:
    """Milliseconds of the steps that count."""
    sets = (f"cluster.ranks_per_node={layout.ranks}", *layout.sets)
    words = [word for value in sets for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "train", "demo", *words, "--share", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{layout.name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    metrics = Path(json.loads(done.stdout)["folder"]) / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["elapsed_ms"] for row in rows if "eval" not in row][WARM:]


Measured = dict[str, list[float]]  # milliseconds of steps, by ranks and layout


def key_of(layout: Candidate) -> str:
    return f"{layout.ranks} ranks: {layout.name}"


def measure(
    folder: Path, layouts: list[Candidate], rounds: int, rows: Path | None, lock: Path | None
) -> Measured:
    """All layouts, so many times; goes on from what is in `rows`.

    Args:
        folder: of jobs.toml.
        layouts: that are trained.
        rounds: steps of each, over STEPS - WARM.
        rows: where measured steps are kept; None: nowhere.
        lock: that is held while one trains.
    """
    found: Measured = {}
    if rows and rows.is_file():
        found = json.loads(rows.read_text())
    for number in range(rounds):
        for layout in layouts[:: -1 if number % 2 else 1]:
            steps = found.setdefault(key_of(layout), [])
            if len(steps) >= (number + 1) * (STEPS - WARM):
                continue
            with held(lock):
                steps += train(folder, layout)
            print(f"  {key_of(layout)}: {steps[-1]:,.0f} ms", file=sys.stderr, flush=True)
            if rows:
                rows.write_text(json.dumps(found, indent=1))
    return found


def show(layouts: list[Candidate], measured: Measured) -> float:
    """Print a table of one number of ranks; returns the first choice's regret."""
    times = {layout: statistics.median(measured[key_of(layout)]) for layout in layouts}
    first = layouts[0]
    best = min(times.values())
    print(f"\n| place | layout on {first.ranks} ranks | ms a step | over the best | calibrated |")
    print("|---|---|---|---|---|")
    errors = []
    for layout, seen in times.items():
        calibrated = layout.predicted / first.predicted * times[first]
        if layout is not first:
            errors.append(abs(calibrated / seen - 1))
        text = f"| {layout.place} | {layout.name} | {seen:,.0f} | {seen / best - 1:+.0%} |"
        print(f"{text} {calibrated:,.0f} ({calibrated / seen - 1:+.0%}) |")
    regret = times[first] / best - 1
    mean = statistics.fmean(times.values()) / best - 1
    print(
        f"\nregret {regret:.1%}, of a random pick among these {mean:.1%}; others' times from the"
        f" first's run: median error {statistics.median(errors):.1%}"
    )
    return regret


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=Path, help="keep measured steps there, and go on from them")
    parser.add_argument("--lock", type=Path, help="a file that is locked while a layout trains")
    parser.add_argument("--print", action="store_true", help="only what would be trained")
    asked = parser.parse_args()
    print(describe(machine()), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        (folder / "jobs.toml").write_text(JOBS_TOML)
        by_ranks = {ranks: candidates_of(folder, ranks) for ranks in asked.ranks}
        if asked.print:
            for layouts in by_ranks.values():
                for layout in layouts:
                    print(f"{layout.place:5} {layout.predicted:8.3g} {key_of(layout)}")
            return
        every = [layout for layouts in by_ranks.values() for layout in layouts]
        measured = measure(folder, every, asked.rounds, asked.rows, asked.lock)
    wrong = [ranks for ranks, layouts in by_ranks.items() if show(layouts, measured) > LIMIT]
    sys.exit(f"not as claimed on {wrong} ranks" if wrong else 0)


if __name__ == "__main__":
    main()
