"""Who may touch what while Slurm's arrays are on their way: cancel, runs that join or have gone,
arrays put back, a slurmctld that is away; data made anew.

Slurm's programs are recorded ones; the real thing is in tests/cluster/test_slurm_stages.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.conftest import wait_for
from tests.launch.recorded_slurm import Slurm, need, new_start, part, ready, submit, units
from tests.launch.supervised import make_run
from tests.programs import put_program
from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.locks import locked
from trainkit.cli.run.attach import cancel
from trainkit.cli.run.stages import stage_ui
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.launch.array_units import ArrayUnit, array_levels
from trainkit.launch.preparation import term_interrupts
from trainkit.launch.run_inputs import write_inputs
from trainkit.launch.scheduler_contract import CancelledJob
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.launch.slurm import arrays
from trainkit.launch.slurm.array_scripts import array_script
from trainkit.launch.slurm.arrays import follow_arrays, run_arrays
from trainkit.launch.slurm.batch_job import supervise_batch
from trainkit.launch.slurm.job_graph import stage_failure
from trainkit.launch.slurm.reconcile import reconciled
from trainkit.launch.slurm.sbatch import secrets_path
from trainkit.launch.slurm.scheduler import cancel_newest_job
from trainkit.launch.slurm.shared_arrays import SharedArrayStatus
from trainkit.launch.slurm.stage_graph import hold_stage_graph
from trainkit.launch.slurm.submit_run import submit_run, submit_with_stages
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record, write_starter
from trainkit.runs.slurm import add_slurm_job, change_slurm_job
from trainkit.stages.array_task import run_once
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork, wait_for_arrays
from trainkit.stages.in_flight import ArraysInFlight, all_in_flight, read_in_flight, write_in_flight

SECRETS = {"schema": "secrets/1", "values": {"TOKEN": "abcdef"}}


@pytest.fixture
def deaf() -> Iterator[None]:
    """SIGHUP does nothing to this process by itself."""
    former = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, former)


def a_run(slurm: Slurm, name: str) -> RunFolder:
    """A run with its job, not submitted."""
    run = slurm.run(name)
    write_job(run.job, load(slurm.folder).resolve("small"))
    return run


def cancelled_by_scancel(slurm: Slurm) -> None:
    """scancel ends what squeue says at once."""
    (slurm.folder / "bin" / "scancel").write_text(
        f'#!/bin/bash\necho "scancel $*" >> {slurm.folder}/lines\nfor id in "$@"; do sed -i'
        f' "s/^$id|.*/$id|CANCELLED/" {slurm.folder}/states; done\n'
    )


def test_a_run_that_is_just_submitted_is_cancelled_once_it_is(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled_by_scancel(slurm)
    slurm.says("104|PENDING")
    run = a_run(slurm, "one")
    write_starter(run)
    later = threading.Timer(0.5, lambda: add_slurm_job(run, "104", first_attempt=1))
    later.start()
    answer = cancel(slurm.task, "one", save=False)
    later.join()
    assert (
        answer.exit == Exit.CANCELLED
        and read_run_record(run).state == "cancelled"
        and slurm.lines() == ["scancel 104"]
    )
    assert f"is being begun by pid {os.getpid()}" in capsys.readouterr().out


def test_cancel_does_not_wait_for_ever_for_whoever_begins_a_run(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.experiment.cancel.BEGIN_SECONDS", 0.1)
    write_starter(a_run(slurm, "one"))
    with pytest.raises(TrainkitError, match=f"still being begun by pid {os.getpid()}") as caught:
        cancel(slurm.task, "one", save=False)
    assert caught.value.exit == Exit.CONTACT_LOST


def test_a_small_job_leaves_the_record_of_arrays_that_began_since(slurm: Slurm) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 1)))
    run.code.rmdir()
    run.code.symlink_to(Path(arrays.__file__).parents[3])
    write_job(run.job, load(slurm.folder).resolve("small"))
    stamps = slurm.folder / "stamps" / "prep-data"
    theirs = ArraysInFlight("a", "a", "other", ("205",), ("/other/level.json",), ("/other",))
    write_in_flight(stamps, theirs)
    assert ready(run) == Exit.STAGE_FAILED and all_in_flight(stamps, "a") == [theirs]


def test_who_leaves_holds_the_lock_and_leaves_the_record_until_the_arrays_are_over(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.launch.slurm.withdraw.LOCK_SECONDS", 0.1)
    run, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    stamps = slurm.folder / "stamps" / "prep-data"
    slurm.says("101|RUNNING", "102|PENDING", "103|PENDING")
    before = read_in_flight(stamps, "a")
    with (
        locked(stamps / "a.lock", {}),
        pytest.raises(TrainkitError, match=f"pid {os.getpid()} is at work on prep-data a"),
    ):
        withdraw_stage_jobs(run)
    assert (
        before is not None
        and all_in_flight(stamps, "a") == [before]
        and not any(line.startswith("scancel") for line in slurm.lines())
    )
    (slurm.folder / "bin" / "scancel").write_text(
        "#!/bin/bash\necho slurmctld is away >&2; exit 1\n"
    )
    with pytest.raises(TrainkitError, match="slurmctld is away"):
        withdraw_stage_jobs(run)
    assert all_in_flight(stamps, "a") == [replace(before, runs=())], "they may still write"


def test_a_run_that_waits_no_more_keeps_no_arrays_alive(slurm: Slurm) -> None:
    first, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    (making,) = all_in_flight(slurm.folder / "stamps" / "prep-data", "a")
    second, _ = submit(slurm, "two", part(slurm, need("a", 3), making))
    (making,) = all_in_flight(slurm.folder / "stamps" / "prep-data", "a")
    assert len(making.runs) == 2
    for run in (first, second):
        write_json(run.job, {})
    cancelled_by_scancel(slurm)
    slurm.says(
        "101|RUNNING", "102|PENDING", "103|PENDING", "104|PENDING", "105|PENDING", "106|PENDING"
    )
    cancelled = cancel_newest_job(second, queued=True)
    assert [line for line in slurm.lines() if line.startswith("scancel")] == [
        "scancel 106",
        "scancel --quiet 105",
    ], "not the first's"
    assert cancelled == CancelledJob("106", "CANCELLED", ["105"])
    left = read_in_flight(slurm.folder / "stamps" / "prep-data", "a")
    assert left is not None and left.runs == (str(first.path),)
    # as where a person has typed scancel
    write_in_flight(slurm.folder / "stamps" / "prep-data", making)
    assert withdraw_stage_jobs(first) == ["101", "102", "103"]


def test_secrets_go_where_no_supervisor_ever_comes(slurm: Slurm) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 1)))
    write_json(secrets_path(run), SECRETS)
    slurm.says("101|FAILED", "102|CANCELLED", "103|CANCELLED", "104|CANCELLED")
    assert (
        reconciled(read_run_record(run)).exit == Exit.STAGE_FAILED
        and not secrets_path(run).exists()
    )

    run = a_run(slurm, "two")
    cancelled_by_scancel(slurm)
    add_slurm_job(run, "7", first_attempt=1)
    write_json(secrets_path(run), SECRETS)
    slurm.says("7|PENDING")
    cancel_newest_job(run, queued=True)
    assert not secrets_path(run).exists()

    run, _ = submit(slurm, "three", part(slurm, need("c", 1)))
    run.code.rmdir()
    run.code.symlink_to(Path(arrays.__file__).parents[3])
    write_job(run.job, load(slurm.folder).resolve("small"))
    write_json(secrets_path(run), SECRETS)
    assert ready(run) == Exit.STAGE_FAILED and not secrets_path(run).exists(), (
        "the small job's refusal"
    )


def test_secrets_go_where_a_run_is_not_taken_back_either(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resume`, refused by sbatch."""
    monkeypatch.setenv("TOKEN", "abcdef")
    resolved = load(slurm.folder).resolve("small", ['cluster.secrets=["TOKEN"]'])
    run = slurm.run("one")
    write_job(run.job, resolved)
    (slurm.folder / "bin" / "sbatch").write_text("#!/bin/bash\necho no >&2; exit 1\n")
    with pytest.raises(TrainkitError, match="sbatch refuses"):
        submit_run(replace(new_start(resolved, slurm.folder), run=run))
    assert not secrets_path(run).exists()


def test_a_run_on_slurm_looks_at_its_data_itself(slurm: Slurm) -> None:
    """As `resume` does: hours lie between a person's word and the first attempt, and between two
    allocations."""
    run = make_run(slurm.folder / "project", ["cluster.launcher=slurm"])
    data = slurm.folder / "tokens.bin"
    data.write_text("tokens")
    write_inputs(run, [Need("prep-data", "a", "a", 1, {}, (), (data,), ())])
    add_slurm_job(run, "7", first_attempt=1)
    change_slurm_job(run, "7", began=1)  # put back after an attempt
    write_json(secrets_path(run), SECRETS)
    put_program(slurm.folder / "bin", "scontrol", "#!/bin/bash\necho n1\n")
    data.write_text("other tokens")
    with pytest.raises(
        TrainkitError,
        match=r"tokens.bin has changed since run .* began; its samples would no longer be the same",
    ) as caught:
        supervise_batch(
            run, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "1"}
        )
    record = read_run_record(run)
    assert (caught.value.exit, record.state, record.exit, record.failure_class) == (
        Exit.STAGE_STALE,
        "failed",
        Exit.STAGE_STALE,
        "user",
    )
    assert (
        "has changed" in str(record.root_cause)
        and not secrets_path(run).exists()
        and run.attempts() == []
    )


def test_a_closed_terminal_while_the_graph_is_submitted_leaves_no_half_of_it(
    slurm: Slurm, deaf: None
) -> None:
    (slurm.folder / "corpus").mkdir()
    (slurm.folder / "corpus" / "part.jsonl").write_text('{"text": "the quick brown fox"}\n' * 60)
    resolved = load(slurm.folder).resolve("text")
    (slurm.folder / "bin" / "sbatch").write_text(
        f'#!/bin/bash\necho "sbatch $*" >> {slurm.folder}/lines\nn=$(grep -c ^sbatch'
        f" {slurm.folder}/lines)\necho $((100 + n))\n[ $n -ne 2 ] || kill -HUP $PPID\n"
    )
    slurm.says("101|PENDING", "102|PENDING")
    job = resolved.job
    preparation = preparation_for(job, slurm.folder, stage_ui(slurm.task))
    with pytest.raises(KeyboardInterrupt), hold_stage_graph(job, preparation) as graph:
        submit_with_stages(new_start(resolved, slurm.folder), graph, lambda text: None)
    assert slurm.lines()[-1].startswith("scancel --quiet 101") and not list(
        (slurm.folder / "runs").glob("*/*/job.json")
    )


class Silent:
    """A reporter that tells nobody."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


def test_arrays_that_are_waited_for_have_a_record_too(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, deaf: None
) -> None:
    """`prep-data` whose terminal is closed: they are taken out of Slurm, and until they are over
    the next caller waits."""
    monkeypatch.setattr(arrays, "END_SECONDS", 0.1)
    one, stamps, said = replace(need("a", 1)), slurm.folder / "stamps" / "prep-data", list[str]()
    place = replace(part(slurm, one).place, root=slurm.folder, notice=said.append)
    (stamps / "a").mkdir(parents=True)
    slurm.says("101|RUNNING", "102|PENDING")
    seen: list[ArraysInFlight] = []

    def hangs_up(*words: object) -> None:
        seen.extend(all_in_flight(stamps, "a"))
        os.kill(os.getpid(), signal.SIGHUP)
        threading.Event().wait()  # for ever, but for the signal

    monkeypatch.setattr(arrays, "follow_arrays", hangs_up)
    with term_interrupts(), pytest.raises(KeyboardInterrupt):
        run_arrays(place, StageWork(one, one.units, stamps, Silent()))
    assert seen[0].jobs == ("101", "102") and f"of pid {os.getpid()}" in seen[0].words()
    assert slurm.lines()[-1] == "scancel --quiet 101 102" and all_in_flight(stamps, "a") == seen, (
        "Slurm says that they still run"
    )
    (slurm.folder / "lines").unlink()
    cancelled_by_scancel(slurm)
    with term_interrupts(), pytest.raises(KeyboardInterrupt):
        run_arrays(place, StageWork(one, one.units, stamps, Silent()))
    assert all_in_flight(stamps, "a") == []


def test_a_unit_under_which_node_after_node_fails_is_not_begun_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    files = {name: str(tmp_path / f"u.{name}") for name in ("out", "log", "stamp")}
    out = tmp_path / "u.out"
    crash = {
        "name": "u",
        "argv": [sys.executable, "-c", "import os; os.kill(os.getppid(), 9)"],
        "env": {},
        "digest": "abc",
        "outputs": [],
        **files,
    }
    level = tmp_path / "level.json"
    write_json(level, document("level/1", tasks=1, shares=[[crash]]))
    codes = []
    for restart in range(4):  # the node takes its task with it, without a word
        environment = {
            **os.environ,
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_PROCID": "0",
        }
        codes.append(
            forkserver.run(
                [sys.executable, "-m", "trainkit.stages.array_task", str(level)],
                env=environment,
                check=False,
            ).returncode
        )
    assert codes == [-9, -9, -9, 1]
    error, ended = (json.loads(line) for line in out.read_text().splitlines())
    assert (
        "failed under it 3 times" in error["error"]["problems"][0]["message"]
        and ended["ended"] == 1
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    well = {**crash, "argv": [sys.executable, "-c", 'print("{\\"result\\": {}}")']}
    assert run_once(well) == 0 and not list(tmp_path.glob("*.begun")), (
        "another job begins to count anew"
    )


def test_a_task_that_slurm_takes_back_has_lost_no_node(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"u.{name}") for name in ("out", "log", "stamp")}
    program = f"open('{tmp_path}/began', 'w'); import time; time.sleep(86400)"
    unit = {
        "name": "u",
        "argv": [sys.executable, "-c", program],
        "env": {},
        "digest": "abc",
        "outputs": [],
        **files,
    }
    write_json(tmp_path / "level.json", document("level/1", tasks=1, shares=[[unit]]))
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_PROCID": "0",
    }
    task = forkserver.Popen(
        [sys.executable, "-m", "trainkit.stages.array_task", str(tmp_path / "level.json")],
        env=environment,
    )
    wait_for((tmp_path / "began").exists, "the task to begin", timeout=600)
    assert (tmp_path / "u.out.begun").exists()
    task.terminate()
    assert task.wait() == 143 and not (tmp_path / "u.out.begun").exists()


def test_a_slurmctld_that_is_away_is_waited_out_and_told_once(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.stages.execute.WAIT_SECONDS", 0.01)
    making, said, squeue = (
        ArraysInFlight("a", "a", "0", ("1",), (), ("/runs/small/one",)),
        list[str](),
        slurm.folder / "bin" / "squeue",
    )
    works = squeue.read_text()
    squeue.write_text(
        f"#!/bin/bash\necho asked >> {slurm.folder}/asked; [ $(wc -l < {slurm.folder}/asked) -gt 3"
        " ] && echo '1|COMPLETED' && exit\necho Unable to contact slurm controller >&2; exit 1\n"
    )
    wait_for_arrays(making, SharedArrayStatus(said.append))
    assert len((slurm.folder / "asked").read_text().splitlines()) == 4
    (told,) = said
    assert "Unable to contact slurm controller" in told and "jobs 1 of run one" in told

    (slurm.folder / "asked").unlink()
    said.clear()
    monkeypatch.setattr("trainkit.launch.slurm.squeue.FASTEST", 0.01)
    batch = ArrayUnit(Unit("u", (), {}), slurm.folder)
    monkeypatch.setattr(arrays, "POLL_SECONDS", 0.05)
    follow_arrays(["1"], [batch], Silent(), said.append)
    assert len(said) == 1 and batch.waiting
    squeue.write_text(works)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TrainkitError, match="there is no squeue"):
        SharedArrayStatus(said.append)(making)


def test_options_of_arrays_are_quoted_as_those_of_the_run(slurm: Slurm) -> None:
    place = part(slurm, need("a", 1)).place
    cluster = place.cluster.model_copy(
        update={"slurm": {"comment": "my run # two", "no-requeue": False}}
    )
    level, *_ = array_levels(need("a", 1), need("a", 1).units, place.asked)
    lines = array_script(
        replace(place, cluster=cluster), level, slurm.folder, slurm.folder
    ).splitlines()
    assert "#SBATCH --comment='my run # two'" in lines and "#SBATCH --requeue" in lines


def test_a_unit_lost_with_its_nodes_is_named_by_the_record(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    unit = units(run, 0)[0]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    write_json(Path(f"{unit['out']}.begun"), {"job": "7", "nodes": ["n1", "n2", "n3"]})
    assert run_once(unit) == 1
    failure = stage_failure(run)
    assert (
        failure is not None
        and failure["unit"] == unit["name"]
        and "3 times (n1, n2, n3)" in failure["message"]
        and failure["exit"] == 6
    )
