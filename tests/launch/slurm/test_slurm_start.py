"""Why a job of Slurm's ends, asked of Slurm whenever it does: in its first seconds nobody else
may have been told. Programs print what the real ones do."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch.supervised import make_run
from trainkit.base.errors import ConfigError, Exit
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.slurm import batch_supervisor as batch
from trainkit.launch.slurm.allocation import SlurmAllocation
from trainkit.launch.slurm.batch_job import FailedProlog, _successor, supervise_batch
from trainkit.launch.slurm.batch_script import batch_script, script_path
from trainkit.launch.slurm.batch_supervisor import (
    BatchStopRequests,
    BatchSupervisor,
)
from trainkit.launch.supervise.attempt_context import AttemptResult
from trainkit.launch.supervise.observer import silent_observer
from trainkit.launch.supervise.outcome import Outcome, StopRequest
from trainkit.runs.events import AttemptEnded, EventLog, RootCause
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import add_slurm_job, read_slurm_jobs

HOSTS = ("n1", "n2", "n3", "n4")
RUNNING = (
    "JobId=7 JobState=RUNNING Reason=None Requeue=1 Restarts=0 TimeLimit=UNLIMITED"
    " StartTime=2026-11-22T05:17:13 EndTime=Unknown ExcNodeList=(null) Partition=main"
)
PREEMPTED = RUNNING + " PreemptTime=2026-11-22T05:17:15"
PUT_BACK = RUNNING.replace("Restarts=0", "Restarts=1").replace("RUNNING", "COMPLETING")
NOT_REACHED: RootCause = {
    "message": "1 of 4 hosts is not reached",
    "hosts": [{"host": "n2", "why": "no agent came"}],
}


@dataclass
class Control:
    """Programs that stand for scontrol and its like: `says` is what `show job` prints, `asked`
    what they were all called with."""

    folder: Path

    def says(self, text: str) -> None:
        (self.folder / "job").write_text(text + "\n")

    def nodes(self, **states: str) -> None:
        (self.folder / "nodes").write_text(
            "".join(f"{name}|{state}\n" for name, state in states.items())
        )

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def fails(self, words: str) -> None:
        """Those calls that contain these words fail."""
        (self.folder / "fails").write_text(words)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    made = Control(tmp_path)
    said = {
        "scontrol": (
            f'case "$*" in *"show job"*) cat {tmp_path}/job;; *hostnames*) echo "${{*: -1}}" | tr ,'
            ' "\\n";; esac'
        ),
        "sinfo": f"cat {tmp_path}/nodes",
    }
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "sinfo", "scancel", "sbatch"):
        program = tmp_path / "bin" / name
        fails = (
            f'if [ -e {tmp_path}/fails ] && [[ "{name} $*" == *"$(cat {tmp_path}/fails)"* ]]; then'
            ' echo "slurmctld is away" >&2; exit 1; fi'
        )
        program.write_text(
            f'#!/bin/bash\necho "{name} $*" >>'
            f" {tmp_path}/asked\n{fails}\n{said.get(name, 'echo 8')}\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    made.says(RUNNING)
    made.nodes(n1="alloc", n2="alloc", n3="alloc", n4="alloc", n5="idle")
    return made


def supervisor(control: Control, *sets: str) -> BatchSupervisor:
    """That of job 7 on four nodes, in its first attempt."""
    hosts = [Host(name, slots=(0,)) for name in HOSTS]
    run = make_run(
        control.folder / "project", ["cluster.launcher=slurm", *sets], hosts=hosts, nodes=4
    )
    add_slurm_job(run, "7", first_attempt=1)
    made = BatchSupervisor(
        run, {}, BatchStopRequests(), silent_observer(), SlurmAllocation("7", HOSTS, 0)
    )
    (run.path / "launch").mkdir(exist_ok=True)
    script_path(run).write_text(batch_script(made.job, run))
    made.attempt = Attempted(run, EventLog(run.attempt(1)))  # type: ignore[assignment]
    return made


@dataclass
class Attempted:
    """What a supervisor knows of its attempt."""

    run: RunFolder
    events: EventLog

    @property
    def folder(self) -> Any:
        return self.run.attempt(1)


def no_start(*suspects: str) -> AttemptResult:
    """An attempt whose agents did not all come."""
    return AttemptResult(Outcome(Exit.START, "infra", NOT_REACHED.copy(), suspects))


def ended(made: BatchSupervisor, end: AttemptResult) -> list[dict[str, Any]]:
    """Judge an end, as the supervisor does; the attempt's events."""
    judged = made._judge(end)
    made._record_end(judged)
    assert not made._starts_again(judged), "never again in this allocation"
    return [json.loads(line) for line in made.run.attempt(1).events.read_text().splitlines()]


def test_agents_that_die_of_a_preemption_s_term_end_nothing(control: Control) -> None:
    """Within a GraceTime only steps are told: srun's script dies before its agent listens, and
    the supervisor has heard nothing."""
    control.says(PREEMPTED)
    made = supervisor(control)
    *_, end, retry = ended(made, no_start(*HOSTS))
    assert (end["exit"], end["class"], retry["class"], retry["by"]) == (
        12,
        "preempted",
        "preemption",
        "slurm",
    )
    assert end["root_cause"] == {
        "message": "Slurm takes its nodes back: its ranks had not begun",
        "saved": False,
    }
    assert (
        "scontrol requeue 7" in control.asked()
        and made.budgets.left["preemption"] == 99
        and made.budgets.left["infra"] == 3
    )


@pytest.mark.parametrize(
    ("says", "fails", "sets", "suspects", "exit", "retried"),
    [
        pytest.param(
            PUT_BACK, "no call", [], HOSTS, 12, ["preemption"], id="Slurm has put it back"
        ),
        # a prolog that fails, a root that is not shared: a person has to mend it
        pytest.param(RUNNING, "no call", [], HOSTS, 8, [], id="all nodes lack it"),
        pytest.param(RUNNING, "no call", ["retry.infra=0"], ["n2"], 8, [], id="no budget"),
        pytest.param(PREEMPTED, "no call", ["resume=never"], HOSTS, 12, [], id="never goes on"),
        pytest.param(RUNNING, "show job", [], HOSTS, 8, [], id="slurmctld does not answer"),
    ],
)
def test_a_start_that_fails_and_is_not_put_back_by_us(
    control: Control,
    says: str,
    fails: str,
    sets: list[str],
    suspects: Sequence[str],
    exit: int,
    retried: list[str],
) -> None:
    control.says(says)
    control.fails(fails)
    told = ended(supervisor(control, *sets), no_start(*suspects))
    assert [e["exit"] for e in told if e["event"] == "ended"] == [exit]
    assert [e["class"] for e in told if e["event"] == "retry"] == retried
    assert "scontrol requeue 7" not in control.asked()


def test_a_requeue_between_our_question_and_ours(control: Control) -> None:
    made = supervisor(control)
    control.fails("scontrol requeue")
    control.says(PREEMPTED)
    judged = made._judge(no_start(*HOSTS))
    control.says(PUT_BACK)
    made._starts_again(judged)
    assert made.continue_kind == "preemption", "Slurm has put it back itself meanwhile"


def test_scancel_while_the_agents_start(control: Control) -> None:
    control.says(RUNNING.replace("RUNNING", "COMPLETING"))
    *_, end = ended(supervisor(control), no_start(*HOSTS))
    assert (end["event"], end["exit"]) == ("ended", 12) and "scancel" in end["root_cause"][
        "message"
    ]


def test_a_node_that_slurm_gives_up_while_the_agents_start(control: Control) -> None:
    control.nodes(n1="alloc", n2="down*", n3="alloc", n4="alloc", n5="idle")
    *_, end, retry = ended(supervisor(control), no_start(*HOSTS))
    assert (end["exit"], retry["class"]) == (8, "infra")


def test_one_bad_node_at_the_start_is_left_out(control: Control) -> None:
    """After days in the queue: the others are good, and Slurm has more."""
    control.says(RUNNING.replace("(null)", "n9"))
    made = supervisor(control)
    _, retry, left = ended(made, no_start("n2"))
    assert (retry["class"], retry["left_out"], left["event"], left["host"]) == (
        "infra",
        ["n2"],
        "host_left_out",
        "n2",
    )
    asked = control.asked()
    assert (
        asked.index("scontrol requeue 7") < asked.index("scontrol update JobId=7 ExcNodeList=n2,n9")
        and made.budgets.left["infra"] == 2
    )


@pytest.mark.parametrize(
    "sets", [["cluster.slurm.nodelist=n[1-4]"], []], ids=["by name", "no others"]
)
def test_a_bad_node_is_not_left_out_where_the_job_could_never_start_then(
    control: Control, sets: list[str]
) -> None:
    if not sets:
        control.nodes(n1="alloc", n2="alloc", n3="alloc", n4="alloc", n5="drained")
    *_, retry = ended(supervisor(control, *sets), no_start("n2"))
    assert retry["event"] == "retry" and not [
        words for words in control.asked() if "update" in words
    ]


def test_a_prolog_that_failed_in_the_script_alone_is_its_hosts(control: Control) -> None:
    """With pyxis no node runs it again: an attempt that names the host, and Slurm gives another."""
    made = supervisor(control)
    assert made.attempt is not None
    made.attempt.events.close()
    made = BatchSupervisor(
        made.run, {}, BatchStopRequests(), silent_observer(), made.granted, FailedProlog("n1", 5)
    )
    made.address = lambda: "127.0.0.1"  # type: ignore[method-assign]
    outcome = asyncio.run(made.supervise())
    assert (outcome.exit, outcome.failure_class, made.continue_kind, list(made.bad_nodes)) == (
        8,
        "infra",
        "infra",
        ["n1"],
    )
    assert (
        "prolog of clusters.here failed in the batch script (exit code 5)" in made.bad_nodes["n1"]
    )


def test_a_person_s_word_comes_before_slurm_s(control: Control) -> None:
    """`cancel --save`, and nodes that are wanted for another job at the same time."""
    control.says(PREEMPTED)
    made = supervisor(control)
    made.stop_requests.request_save(StopRequest.SAVE)
    *_, end = ended(
        made,
        AttemptResult(
            Outcome(
                Exit.PREEMPTED, "preempted", {"message": "asked to save and stop", "saved": True}
            ),
            began=True,
        ),
    )
    assert (
        end["event"] == "ended"
        and end["root_cause"]["saved"] is True
        and "scontrol requeue 7" not in control.asked()
    )


def test_what_slurm_wanted_before_anybody_listened(control: Control) -> None:
    """The script ignores TERM until the supervisor is there, and a GraceTime's goes to steps
    only."""
    for said, asked in [
        (RUNNING, None),
        (PREEMPTED, StopRequest.SAVE),
        (RUNNING.replace("Restarts=0", "Restarts=1"), StopRequest.SAVE),
        (RUNNING.replace("RUNNING", "COMPLETING"), StopRequest.SAVE),
    ]:
        made = BatchSupervisor(
            supervisor(control).run,
            {},
            BatchStopRequests(),
            silent_observer(),
            SlurmAllocation("7", HOSTS, 0),
        )
        control.says(said)
        made.check_before_start()
        assert made.stop_requests.first == asked, said


def limited(seconds: float, *, since: float = 0.0) -> str:
    """A job with a time limit that began some seconds ago, as Slurm tells of it."""
    start, end = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + at))
        for at in (-since, seconds - since)
    )
    return RUNNING.replace("2026-11-22T05:17:13", start).replace(
        "EndTime=Unknown", f"EndTime={end}"
    )


def test_a_signal_that_would_leave_no_time_to_train_does_not_count(control: Control) -> None:
    """A partition whose limit nobody told us: USR1@300 of five minutes comes at once, whether we
    listen already or not."""
    control.says(limited(240))
    made = supervisor(control)
    made.batch_requests._on_signal(signal.SIGUSR1, None)
    made.check_before_start()
    assert made.stop_requests.first is None and made.batch_requests.signalled is None
    made = BatchSupervisor(made.run, {}, BatchStopRequests(), silent_observer(), made.granted)
    made.check_before_start()
    made.batch_requests._on_signal(signal.SIGUSR1, None)
    assert made.stop_requests.first is None
    left = made._until_saving()
    assert left is not None and left <= 240 - 60, "a quarter of the limit is for saving"
    control.says(limited(3600))
    made = BatchSupervisor(made.run, {}, BatchStopRequests(), silent_observer(), made.granted)
    made.check_before_start()
    made.batch_requests._on_signal(signal.SIGUSR1, None)
    assert (
        made.stop_requests.first == StopRequest.SAVE
        and made.batch_requests.signalled == signal.SIGUSR1
    ), "an hour has room for it"


def test_our_own_clock_tells_too(control: Control) -> None:
    """A signal that was lost before anybody listened is not missed; an end that was moved is
    asked for again."""
    control.says(limited(3600, since=3301))
    made = supervisor(control)
    asyncio.run(made._watch_time())
    assert (
        made.batch_requests.signalled == signal.SIGUSR1
        and made.stop_requests.first == StopRequest.SAVE
    )
    control.says(RUNNING)
    made = BatchSupervisor(made.run, {}, BatchStopRequests(), silent_observer(), made.granted)
    asyncio.run(made._watch_time())
    assert made.stop_requests.first is None, "no limit"
    control.fails("show job")
    assert made._until_saving() == batch.ASK_AGAIN_SECONDS


@pytest.mark.parametrize(
    ("options", "signal_"),
    [
        (["slurm.time=4"], "B:USR1@60"),
        (["slurm.time=1:00:00"], "B:USR1@300"),
        (["slurm.time=0-0:8"], "B:USR1@120"),
        (["slurm.time=0"], "B:USR1@300"),
        ([], "B:USR1@300"),
        (["slurm.time=4", "slurm.signal=B:USR1@100"], "B:USR1@100"),
    ],
)
def test_the_signal_leaves_time_to_train(
    control: Control, options: list[str], signal_: str
) -> None:
    made = supervisor(control, *options)
    assert f"#SBATCH --signal={signal_}" in batch_script(made.job, made.run).splitlines()


def test_a_signal_before_the_job_begins_is_refused(control: Control) -> None:
    with pytest.raises(ConfigError) as caught:
        supervisor(control, "slurm.time=5", "slurm.signal=B:USR1@300")
    assert "300 s before the end of slurm.time = 5, which is 300 s" in str(caught.value)


def test_a_signal_between_two_attempts_is_judged_like_any_other(control: Control) -> None:
    """Slurm's TERM in a pause, or before the first attempt, ends no run for good: there is an
    attempt that ends at once, and its end asks Slurm why."""
    made = supervisor(control)
    made.stop_requests.request_save(StopRequest.SAVE)
    assert (
        asyncio.run(made._stop_between_attempts(no_start())) is None
        and asyncio.run(made._stop_between_attempts(None)) is None
    )


def test_a_successor_that_cannot_be_taken_back_is_not_forgotten(
    control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays in the record, is named, and ends by itself when it comes: the run has ended."""
    made = supervisor(control, "resume=chain")
    control.fails("scancel")
    entry = read_slurm_jobs(made.run)[0]
    with _successor(made.run, made, entry):
        assert [job.id for job in read_slurm_jobs(made.run)] == ["7", "8"]
    assert [job.id for job in read_slurm_jobs(made.run)] == ["7", "8"]
    assert (
        "job 8, which was to go on with the run, is still in the queue" in capsys.readouterr().out
    )
    made.attempt.events.write(  # type: ignore[union-attr]
        AttemptEnded(9, {"message": "m"}, 1, failure_class="user")
    )
    outcome = supervise_batch(
        made.run, {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": ",".join(HOSTS), "PATH": "/bin"}
    )
    assert outcome.exit == 9 and [job.id for job in read_slurm_jobs(made.run)] == ["7"]


@pytest.mark.parametrize(
    ("launcher", "container", "seconds"),
    [("ssh", False, 30), ("slurm", False, 300), ("ssh", True, 900), ("slurm", True, 900)],
)
def test_how_long_agents_may_take_to_come(launcher: str, container: bool, seconds: float) -> None:
    """A prolog of Slurm's, and an image that every node unpacks first, take longer than 30 s."""
    assert (
        Cluster.model_validate({"launcher": launcher}).connect_seconds(container=container)
        == seconds
    )
    assert (
        Cluster.model_validate({"launcher": launcher, "watch": {"connect": 7}}).connect_seconds(
            container=container
        )
        == 7
    )
