"""A rank that is killed with SIGKILL and started again, beside one that never was: the same program
that a supervisor starts, in the same environment.

With `deterministic = true` losses and checkpoints must be the same bits. Without, what differs is
shown: on a GPU sums may be added in another order every time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged
from benchmarks.gpu.sessions import DeviceType, Size, make_job, small_model
from trainkit.base.documents import document
from trainkit.base.files import write_json
from trainkit.base.process import on_this_node
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.engines.native import Native
from trainkit.runs.checkpoints import checkpoint_folder, open_checkpoint
from trainkit.runs.folder import RunFolder, new_run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainkit.jobs.schema import Job

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
SAVED = 6  # steps between checkpoints
KILLED = 15  # the step after which it is killed: not one that is saved
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Trained:
    """What a run left: its losses by step, and the hashes of its last checkpoint's files."""

    losses: dict[int, float]
    hashes: tuple[str, ...]


class RankFailed(Exception):
    """A rank ended with another code than it should; the text has its last words."""


def _start(job: Job, run: RunFolder, attempt: int) -> subprocess.Popen[bytes]:
    """Start the only rank of a run."""
    made = Native().command(job, run, attempt)
    who = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", PARENT_VARIABLE: str(os.getpid())}
    # 0: the store of one rank takes a free port itself, and nobody else must know it
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = ROOT / "trainkit" / "train" / "main.py"
    argv = [sys.executable, "-I", str(program), str(run.path), "--attempt", str(attempt)]
    with open(run.path / f"rank-{attempt}.log", "wb") as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, **on_this_node(made.env), **who, **met},
            cwd=run.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _rows(run: RunFolder) -> list[dict[str, Any]]:
    try:
        lines = run.metrics.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _last_step(run: RunFolder) -> int:
    return max((row["step"] for row in _rows(run)), default=0)


def _end(child: subprocess.Popen[bytes], run: RunFolder, attempt: int) -> None:
    """Wait for the end of an attempt. Raises RankFailed where it is not a success."""
    if code := child.wait():
        words = (run.path / f"rank-{attempt}.log").read_text(errors="replace").splitlines()
        raise RankFailed(f"attempt {attempt} ended with {code}: {' | '.join(words[-5:])}")


def _train(job: Job, folder: Path, *, killed: bool) -> Trained:
    """Train a new run, in one attempt or, killed in between, in two."""
    run = new_run_folder(folder, job.name)
    write_json(run.job, document("job/1", job=job.model_dump(mode="json"), origins={}))
    attempt = 1
    run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    child = _start(job, run, attempt)
    if killed:
        while _last_step(run) < KILLED and child.poll() is None:
            time.sleep(POLL_SECONDS)
        child.send_signal(signal.SIGKILL)
        if child.wait() != -signal.SIGKILL:
            raise RankFailed(f"it ended with {child.returncode} before it could be killed")
        attempt = 2
        run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
        child = _start(job, run, attempt)
    _end(child, run, attempt)
    manifest = open_checkpoint(checkpoint_folder(run.checkpoints, STEPS)).manifest
    losses = {row["step"]: row["lm_loss"] for row in _rows(run) if "eval" not in row}
    return Trained(losses, tuple(sorted(file.xxh128 for file in manifest.files)))


def _job(device: DeviceType, size: Size, folder: Path, **training: Any) -> Job:
    model = small_model("gpt", size).model_copy(
        update={"hidden_dropout": 0.1, "attention_dropout": 0.1}
    )
    values = {
        "precision": "bf16",
        "train_iters": STEPS,
        "save_interval": SAVED,
        "log_interval": 1,
        **training,
    }
    return make_job("resume", model, device, folder, **values)


def _difference(one: Trained, other: Trained) -> float:
    """Largest of any step's loss."""
    return max(abs(one.losses[step] - loss) for step, loss in other.losses.items())


def _judged(name: str, one: Trained, other: Trained) -> Finding:
    whole = sorted(one.losses) == sorted(other.losses) == list(range(1, STEPS + 1))
    same = one == other
    value = "bit-equal"
    if not same:
        value = f"losses differ by {_difference(one, other):.1e}"
    return judged(name, whole and same, value, goal="bit-equal losses and checkpoint")


def _forked(job: Job, folder: Path) -> Finding:
    """Whether ranks of a job can be forked from a process that has imported what they need."""
    run = new_run_folder(folder, job.name)
    write_json(run.job, document("job/1", job=job.model_dump(mode="json"), origins={}))
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); from trainkit.train import parent;"
        " parent.import_all(pathlib.Path(sys.argv[2])); sys.exit(parent.objection() or 0)"
    )
    argv = [sys.executable, "-I", "-c", code, str(ROOT), str(run.path)]
    done = subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    why = " | ".join(done.stderr.splitlines()[-5:])
    return judged("ranks can be forked after all imports", done.returncode == 0, note=why)


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Deterministic, eager and (where there is time) compiled; then without."""
    yield _forked(_job(device, size, folder, compile=size == "full"), folder / "forked")
    ways: list[tuple[str, dict[str, Any]]] = [("deterministic", {"deterministic": True})]
    if size == "full":
        ways.append(("deterministic, compiled", {"deterministic": True, "compile": True}))
    for words, keys in ways:
        job = _job(device, size, folder, **keys)
        try:
            never = _train(job, folder / "never", killed=False)
            killed = _train(job, folder / "killed", killed=True)
        except RankFailed as error:
            yield judged(f"killed and resumed, {words}", False, goal="bit-equal", note=str(error))
            continue
        yield _judged(f"killed and resumed, {words}", killed, never)
    if size == "full":
        free = _job(device, size, folder)
        one = _train(free, folder / "free", killed=False)
        other = _train(free, folder / "free-killed", killed=True)
        yield Finding(
            "killed and resumed, not deterministic: largest difference of a loss",
            "shown",
            _difference(other, one),
        )
