"""Whole runs on this machine through the real tasks: record, resume, kills, signals, two at
once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading

import pytest

from tests import forkserver
from tests.conftest import Project, alive, wait_for
from tests.launch.live_runs import events, rank_pids, slow_down, wait_for_step
from trainkit.base.process_marks import find_marked

STATUS_KEYS = {
    "schema",
    "run",
    "job",
    "state",
    "step",
    "attempt",
    "folder",
    "exit",
    "class",
    "root_cause",
    "survivors",
    "next",
}


METRIC_KEYS = {
    "step",
    "consumed_samples",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "elapsed_ms",
    "tokens_per_second",
}


LOG_LINE = re.compile(
    r"iteration +(\d+)/ +30 \| consumed samples: +\d+ \| elapsed time per iteration \(ms\): [\d.]+"
    r" \| learning rate: \S+ \| global batch size: +8 \| "
    r"lm loss: \S+ \| loss scale: 1\.0 \| grad norm: \S+ \| number of skipped iterations: +0 \|"
    r" number of nan iterations: +0 \|"
)


def test_a_whole_run_and_all_it_leaves(project: Project) -> None:
    before = project.document("runs")
    assert before == {"schema": "runs/1", "runs": []}
    done = project.document("train", "random")
    assert (
        set(done) >= STATUS_KEYS
        and done["state"] == "succeeded"
        and done["exit"] == 0
        and done["class"] == "success"
        and done["survivors"] == []
    )
    (run,) = project.runs()
    rows = [r for r in project.metrics(run) if "eval" not in r]
    assert [r["step"] for r in rows] == list(range(1, 31)) and all(
        set(r) >= METRIC_KEYS for r in rows
    )
    assert [r["consumed_samples"] for r in rows] == [8 * s for s in range(1, 31)]
    assert [(r["step"], r["eval"]) for r in project.metrics(run) if "eval" in r] == [
        (s, "valid") for s in (0, 10, 20, 30)
    ]
    log = (run / "attempts/1/logs/0.log").read_text()
    assert [int(m) for m in LOG_LINE.findall(log)] == list(range(1, 31))
    listed = project.document("runs")["runs"]
    assert listed == [
        {
            "run": run.name,
            "job": "random",
            "state": "succeeded",
            "step": 30,
            "attempt": 1,
            "folder": str(run),
        }
    ]
    looked_at = {**done, "devices": [], "devices_note": None}  # nothing runs any more
    assert (
        project.document("status", "last")
        == project.document("status", run.name[:12])
        == project.document("status", "random")
        == looked_at
    )
    for name in (
        "job.json",
        "plan.json",
        "origin.json",
        "launch/world.json",
        "launch/inputs.json",
        "code/trainkit/train/main.py",
        "attempts/1/heartbeat/1.json",
    ):
        assert (run / name).is_file(), name
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == [
        "step-00000025",
        "step-00000030",
    ]
    assert json.loads((run / "origin.json").read_text())["packages"]["torch"]
    assert "iteration       30/" in project.invoke("logs", "last").stdout
    assert project.invoke("resume", "last").stdout.endswith("there is nothing to resume\n")
    text = project.invoke("status", "last").stdout
    assert "succeeded" in text and "step 30 of 30" in text


def test_tensorboard_reads_what_the_run_wrote(project: Project) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    project.invoke("train", "random")
    (run,) = project.runs()
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    losses = {e.step: e.value for e in board.Scalars("lm loss")}
    assert losses == pytest.approx(project.losses(run), rel=1e-6)
    assert "--logdir" in project.invoke("tensorboard", "--dry-run").stdout


@pytest.mark.slow
def test_text_job_from_raw_text_to_a_sample(project: Project) -> None:
    out = project.invoke("train", "text").stdout
    assert (
        "a sample from the model" in out
        and "before" in out
        and "invoke generate" in out
        and "tokens/s" in out
    )
    (run,) = project.runs()
    evaluations = [r["lm_loss"] for r in project.metrics(run) if "eval" in r]
    assert evaluations[-1] < evaluations[0] - 1
    greedy = project.document(
        "generate", "last", "--prompt", "the quick", "--temperature", "0", "--max-new-tokens", "4"
    )
    assert greedy["text"].startswith("the quick") and len(greedy["text"]) > len("the quick")
    report = project.document("report", "last", "--picture", "loss.svg", "--flops", "palm-6n")
    assert report["validation_loss"]["last"] == evaluations[-1]
    assert "since submission: " in project.invoke("report", "last").stdout
    assert (report["flops_convention"], report["convention_tflops"] > 0) == ("palm-6n", True)
    assert (project.path / "loss.svg").read_text().startswith("<?xml")
    again = project.invoke("train", "text").stdout
    assert "prep-data lines--bpe is fresh because nothing changed since" in again


@pytest.mark.slow
def test_sigkill_of_everything_then_resume_is_bit_equal(project: Project) -> None:
    slow_down(project, 60)
    project.invoke("train", "random")
    expected = project.losses(project.runs()[0])
    step = random.Random(os.getpid()).randrange(1, 40)
    process = project.start("train", "random")
    pids = rank_pids(project, runs=2)
    wait_for_step(project, step)
    for pid in (process.pid, *pids.values()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=600)
    run = project.runs()[-1]
    assert project.document("status", "last")["class"] == "infra", f"killed at step {step}"
    with open(run / "metrics.jsonl", "a") as torn:
        torn.write('{"step": 31, "lm_lo')
    assert project.document("resume", "last")["attempt"] == 2
    assert project.losses(run) == expected, f"killed at step {step}"


def test_forked_ranks_train_as_others_do(project: Project) -> None:
    """Bit by bit, and whatever becomes of the process that they were forked from."""
    slow_down(project, 60)
    process = project.start("train", "random", "--set", "cluster.watch.connect=600")
    rank_pids(project)
    wait_for_step(project, 1)
    (warm,) = project.runs()
    (parent,) = find_marked(f"{warm.name}/1/0/parent")
    os.kill(parent.pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert "agent_said" not in {event["event"] for event in events(warm)}
    project.invoke("train", "random", "--set", "recovery=cold")
    assert project.losses(warm) == project.losses(project.runs()[-1])
    assert len(project.losses(warm)) >= 60


def test_death_of_the_supervisor_takes_the_ranks(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    pids = rank_pids(project)
    wait_for_step(project, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in pids.values()), "the ranks to die")
    status = project.document("status", "last")
    assert (status["state"], status["class"], status["exit"]) == ("failed", "infra", 10)
    assert "is gone" in status["root_cause"]["message"]


def test_one_killed_rank_stops_its_peers_and_is_named(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    pids = rank_pids(project)
    wait_for_step(project, 1)
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 10, err
    assert not any(alive(pid) for pid in pids.values())
    status = project.document("status", "last")
    assert (status["state"], status["class"]) == ("failed", "infra")
    assert status["root_cause"]["rank"] == 1 and status["root_cause"]["signal"] == "SIGKILL"
    assert "rank 1" in out and "invoke resume" in out


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGINT, 130, "cancelled"),
        (signal.SIGTERM, 12, "preempted"),
        (signal.SIGHUP, 12, "preempted"),
    ],
)
def test_one_signal_saves_at_the_step_and_stops(
    project: Project, number: signal.Signals, code: int, state: str
) -> None:
    slow_down(project)
    process = project.start("train", "random")
    pids = rank_pids(project)
    wait_for_step(project, 7)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code and "Traceback" not in err, out + err
    assert not any(alive(pid) for pid in pids.values())
    status = project.document("status", "last")
    assert status["state"] == state and status["exit"] == code
    run = project.runs()[-1]
    assert f"step-{status['step']:08d}" in {p.name for p in (run / "checkpoints").iterdir()}


def test_two_signals_stop_at_once(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    pids = rank_pids(project)
    os.kill(pids[0], signal.SIGSTOP)  # a rank that will never reach the end of its step
    process.send_signal(signal.SIGINT)
    events = project.runs()[-1] / "attempts/1/events.jsonl"
    wait_for(lambda: '"saving"' in events.read_text(), "the first signal to be taken")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not any(alive(pid) for pid in pids.values())


def test_a_second_run_on_the_same_slots_is_refused_by_name(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    rank_pids(project)
    first = project.runs()[-1].name
    refused = project.invoke("train", "random", exit=17)
    assert first in refused.stderr and "--share" in refused.stderr
    assert first in project.invoke("resume", "last", exit=17).stderr
    assert len(project.runs()) == 1 and len(list((project.path / "runs/random").iterdir())) == 1
    process.send_signal(signal.SIGINT)
    process.communicate()


def test_secrets_reach_the_ranks_and_no_file(project: Project) -> None:
    project.edit_jobs("[clusters.here]", '[clusters.here]\nsecrets = ["MY_API", "MAYBE?"]')
    assert "MY_API" in project.invoke("train", "random", exit=3).stderr
    value = "hunter2-$(touch x)-'\"`"
    project.invoke("train", "random", MY_API=value)
    for file in project.path.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert b"hunter2" not in file.read_bytes(), file
    world = json.loads((project.runs()[-1] / "launch/world.json").read_text())
    assert world["command"]["secret_names"] == ["MY_API", "MAYBE?"]


def test_a_closed_terminal_and_a_reader_that_goes(project: Project) -> None:
    """The run is no worse for it: saved and exit 12, or finished."""
    slow_down(project)
    main, second = os.openpty()
    argv = [sys.executable, "-m", "invoke", "train", "random"]
    process = forkserver.Popen(
        argv,
        cwd=project.path,
        env=project.environment(),
        stdin=second,
        stdout=second,
        stderr=second,
        start_new_session=True,
    )
    os.close(second)
    drain = threading.Thread(
        target=lambda: [None for _ in iter(lambda: read_or_end(main), b"")], daemon=True
    )
    drain.start()
    rank_pids(project)
    wait_for_step(project, 3)
    # as the kernel does for the session of a terminal that closes
    process.send_signal(signal.SIGHUP)
    os.close(main)
    assert process.wait(timeout=600) == 12
    status = project.document("status", "last")
    assert status["state"] == "preempted" and status["step"] >= 3
    with project.start("train", "random", "--set", "training.train_iters=30") as unread:
        assert unread.stdout is not None
        # the plan, build, the run's name
        assert len([unread.stdout.readline() for _ in range(3)]) == 3
        unread.stdout.close()
    wait_for(
        lambda: (
            len(project.runs()) == 2 and project.document("status", "last")["state"] == "succeeded"
        ),
        "the run to finish without its reader",
    )


def read_or_end(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:
        return b""


def test_an_environment_that_is_no_utf8(project: Project) -> None:
    environment = {os.fsencode(k): os.fsencode(v) for k, v in project.environment().items()} | {
        b"NAME": b"Jos\xe9",
        b"PYTHONIOENCODING": b"ascii",
    }
    done = forkserver.run(
        [sys.executable, "-m", "invoke", "train", "text"],
        cwd=project.path,
        env=environment,
        capture_output=True,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert (
        json.loads((project.runs()[-1] / "origin.json").read_text())["environment"]["NAME"]
        == "Jos\udce9"
    )
