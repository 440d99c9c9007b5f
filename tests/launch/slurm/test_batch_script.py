"""The batch script and the line of srun as text: options, quoting, the reference clusters."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm.slurm_jobs import RUN, job, srun
from trainkit.base.errors import ConfigError
from trainkit.jobs import sbatch
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.slurm import cpu_options, node_text
from trainkit.launch.session import Session
from trainkit.launch.slurm.allocation import allocation_hosts, current_allocation
from trainkit.launch.slurm.batch_script import (
    all_options,
    allocation_variables,
    batch_script,
    seconds_before_limit,
)
from trainkit.launch.slurm.reconcile import reconcile
from trainkit.launch.slurm.squeue import JobStatus
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.slurm import add_slurm_job, change_slurm_job, read_slurm_jobs


def options_in(text: str) -> dict[str, str | bool]:
    """What sbatch reads in a script's #SBATCH lines."""
    words = [
        shlex.split(line.removeprefix("#SBATCH "))[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    ]
    return {
        name.removeprefix("--"): value or not equals
        for name, equals, value in (word.partition("=") for word in words)
    }


OURS = {
    "output": f"{RUN.path}/launch/slurm-%j.out",
    "open-mode": "append",
    "requeue": True,
    "signal": "B:USR1@300",
    "export": "HOME,USER,LOGNAME,SHELL,PATH,LANG,LC_ALL,TZ",
    "ntasks-per-node": "1",
}


# The #SBATCH lines and sbatch arguments of the published scripts. Not theirs: ntasks-per-node is 1
# everywhere, since one agent a node starts the ranks
# (bignlp has 8, jean-zay --ntasks=N), and bignlp's --dependency=singleton: a run is found by its
# record, not by the name of its job.
PUBLISHED: Mapping[str, dict[str, str | bool]] = {
    "azure-gpt3-175b": {
        "nodes": "16",
        "partition": "gpu",
        "gpus-per-node": "8",
        "cpus-per-task": "8",
        "gpus-per-task": "8",
        "mem": "0",
    },
    "nemo-gpt3-175b16": {
        "nodes": "16",
        "exclusive": True,
        "gpus-per-node": "8",
        "mem": "0",
        "time": "26-00:00:00",
    },
    "nemo-gpt3-175b": {
        "nodes": "128",
        "exclusive": True,
        "gpus-per-node": "8",
        "mem": "0",
        "time": "26-00:00:00",
    },
    "neuron-gpt3-23b": {"nodes": "4", "exclusive": True, "cpus-per-task": "127"},
    "jean-zay-7-5b": {
        "nodes": "4",
        "cpus-per-task": "32",
        "gres": "gpu:4",
        "hint": "nomultithread",
        "time": "6:00:00",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_reference_clusters(name: str) -> None:
    text = batch_script(job(name), RUN)
    assert options_in(text) == {"job-name": f"{name}-{RUN.id}", **PUBLISHED[name], **OURS}


def test_the_last_line_is_the_supervisor_and_the_prolog_comes_before() -> None:
    lines = batch_script(job("jean-zay-7-5b", "cluster.python=/opt/p/python"), RUN).splitlines()
    assert (
        lines[0] == "#!/bin/bash"
        and lines[-1] == f"exec /opt/p/python -I {RUN.code}/trainkit/launch/main.py {RUN.path}"
    )
    assert lines[-4:-1] == ["module purge", "module load pytorch-gpu/py3/1.8.1", "trap - EXIT"]
    assert lines.index("trap '' USR1 TERM") < lines.index("set -e") < lines.index("module purge")


def test_a_script_is_deaf_from_its_first_line_and_a_login_shell(tmp_path: Path) -> None:
    """TERM while a profile is read would end it, and with it a job that Slurm only wanted to put
    back."""
    chosen = job(
        "jean-zay-7-5b",
        "cluster.prolog=['shopt login_shell', 'kill -TERM $$', 'kill -USR1 $$']",
        f"cluster.python={shutil.which('echo')}",
    )
    text = batch_script(chosen, RUN)
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "trap '' USR1 TERM", "before a profile is read"
    (tmp_path / "slurm_script").write_text(text)
    done = subprocess.run(
        ["bash", str(tmp_path / "slurm_script")],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 0
        and "login_shell    \ton" in done.stdout
        and "launch/main.py" in done.stdout
    ), done.stdout + done.stderr


def test_a_prolog_that_fails_in_the_script_is_the_supervisors_to_judge(tmp_path: Path) -> None:
    """Only the batch host may lack something: the job must not end for that."""
    chosen = job(
        "jean-zay-7-5b",
        "cluster.prolog=['(exit 5)', 'echo never']",
        f"cluster.python={shutil.which('echo')}",
    )
    (tmp_path / "slurm_script").write_text(batch_script(chosen, RUN))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(tmp_path / "slurm_script")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.stdout == f"-I {RUN.code}/trainkit/launch/main.py {RUN.path} --prolog-failed 5\n"
        and done.returncode == 0
    ), done.stderr


def test_how_a_run_goes_on() -> None:
    assert (
        options_in(batch_script(job("neuron-gpt3-23b", "resume=chain"), RUN))["requeue"] is True
    ), "said in the cluster's own table"
    chain = options_in(batch_script(job("jean-zay-7-5b", "resume=chain"), RUN))
    assert chain["no-requeue"] is True and "requeue" not in chain
    assert (
        options_in(batch_script(job("jean-zay-7-5b", "slurm.signal=B:USR1@900"), RUN, seconds=60))[
            "signal"
        ]
        == "B:USR1@900"
    )


def test_what_can_never_start_does_not_wait() -> None:
    assert (
        options_in(batch_script(job("jean-zay-7-5b", "slurm.dependency=afterok:12"), RUN))[
            "kill-on-invalid-dep"
        ]
        == "yes"
    )


def test_values_arrive_as_they_are_written() -> None:
    for value in ["a b", "it's", '"x"', "a#b", "$HOME", "`id`", "a # b", "\\", "漢"]:
        text = _with_comment(value)
        assert options_in(text)["comment"] == value


def _with_comment(value: str) -> str:
    base = job("jean-zay-7-5b")
    return batch_script(base.model_copy(update={"slurm": {"comment": value}}), RUN)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("gpus-pernode=8", "did you mean 'gpus-per-node'?"),
        ("nodes=3", "jobs.X.nodes says how many"),
        ("wait=true", "half a minute late"),
        ("array=1-3", "a run is one job"),
        ("container-image=x", "[containers.X]"),
        ("no-container-entrypoint=true", "[containers.X]"),
    ],
)
def test_options_that_sbatch_does_not_know_or_we_set(option: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job("jean-zay-7-5b", f"slurm.{option}")
    assert said in str(caught.value) and "slurm." in str(caught.value)


def test_all_objections_to_options_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        job("jean-zay-7-5b", "slurm={array='1-3', gpu-per-node=4, error='x'}")
    assert all(
        said in str(caught.value)
        for said in (
            "a run is one job",
            "did you mean 'gpus-per-node'?",
            "both streams go to one file",
        )
    )


def test_a_root_that_fits_no_script() -> None:
    with pytest.raises(ConfigError, match="does not fit into a batch script"):
        batch_script(job("jean-zay-7-5b"), RunFolder(Path("/shared/my runs/%j")))


def test_srun_carries_one_agent_a_node() -> None:
    words = srun("neuron-gpt3-23b")
    assert words[:5] == [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n0,n1",
    ]
    assert {"--kill-on-bad-exit=0", "--wait=0", "--input=none", "--overlap"} < set(words)
    assert words[-3:] == ["/bin/bash", "-l", f"{RUN.session(1)}/srun.sh"]
    assert srun("neuron-gpt3-23b", "cluster.srun_args=['--network=mpi', '--gpu-bind=none']")[
        -5:-3
    ] == ["--network=mpi", "--gpu-bind=none"]
    assert not any("container" in word for word in (*words, *srun("jean-zay-7-5b"))), (
        "neuron and jean-zay run without"
    )


@pytest.mark.parametrize(
    ("name", "allocation", "expected"),
    [
        # srun takes it from no variable since 22.05
        ("azure-gpt3-175b", {}, ("--cpus-per-task=8", "--cpu-bind=none")),
        ("neuron-gpt3-23b", {}, ("--cpus-per-task=127", "--cpu-bind=none")),
        (
            "nemo-gpt3-175b16",
            {"SLURM_JOB_CPUS_PER_NODE": "96(x15),48"},
            ("--cpus-per-task=48", "--cpu-bind=none"),
        ),
        # --cpu-bind and --hint exclude each other
        ("jean-zay-7-5b", {"SLURM_JOB_CPUS_PER_NODE": "80(x4)"}, ("--cpus-per-task=32",)),
    ],
)
def test_the_agent_has_all_cpus_of_its_node(
    name: str, allocation: Mapping[str, str], expected: tuple[str, ...]
) -> None:
    assert (
        cpu_options({**allocation_variables(all_options(job(name), RUN)), **allocation}) == expected
    )
    assert (
        cpu_options({"SLURM_CPUS_PER_TASK": "4", "SLURM_NTASKS_PER_NODE": "8"})[0]
        == "--cpus-per-task=32"
    )


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), {"gpus-per-node": "4", "exclusive": True, "mem": "0"}),
        (("slurm.gres=gpu:4",), {"gres": "gpu:4", "exclusive": True, "mem": "0"}),
        (("slurm.cpus-per-task=32",), {"gpus-per-node": "4", "cpus-per-task": "32"}),
        (("slurm.mem=100G",), {"gpus-per-node": "4", "exclusive": True, "mem": "100G"}),
        (
            ("slurm.cpus-per-task=8", "cluster.ranks_per_node=2"),
            {"gpus-per-node": "2", "cpus-per-task": "8"},
        ),
        (
            (
                "cluster.device=cpu",
                "cluster.gpus_per_node=0",
                "cluster.ranks_per_node=6",
                "nodes=1",
            ),
            {"cpus-per-task": "6"},
        ),
    ],
)
def test_what_ranks_need_is_asked_for(
    sets: Sequence[str], expected: Mapping[str, str | bool]
) -> None:
    """Slurm gives a task one CPU and no GPU unless it is told otherwise."""
    options = all_options(bare(*sets), RUN)
    assert {
        name: str(value) if value is not True else value
        for name, value in options.items()
        if name in RESOURCES
    } == expected


RESOURCES = {"gpus-per-node", "exclusive", "mem", "gres", "cpus-per-task"}


def bare(*sets: str) -> Job:
    """A job on a cluster whose options ask for nothing."""
    chosen = job("jean-zay-7-5b", "cluster.device=h100-sxm-80gb", *sets)
    return chosen.model_copy(update={"cluster": chosen.cluster.model_copy(update={"slurm": {}})})


def test_ranks_that_leave_a_part_of_a_node_must_say_which_part_they_take() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "2 ranks use 2 of the 4 GPUs of a node, and no option of sbatch says how many of its"
            " CPUs"
        ),
    ):
        all_options(bare("cluster.ranks_per_node=2"), RUN)


def test_a_dry_run_shows_all_words_of_srun() -> None:
    """All CPUs of the node, whose number only Slurm will say."""
    shown = cpu_options(
        {
            "SLURM_JOB_CPUS_PER_NODE": "CPUS_OF_A_NODE",
            **allocation_variables(all_options(bare(), RUN)),
        }
    )
    assert shown == ("--cpus-per-task=CPUS_OF_A_NODE", "--cpu-bind=none")


def test_a_node_finds_its_number_by_its_name(tmp_path: Path) -> None:
    """SLURM_NODEID says it; where that is another node's (--distribution, a node left out), the
    name decides."""
    hosts = [Host(name, slots=(0,)) for name in ("a-1", "a-2", "b-1")]
    made = Session(tmp_path, "run", 1, hosts, job("jean-zay-7-5b").cluster, tmp_path, tmp_path, {})
    made.script.write_text('echo "node $1"\n')
    (tmp_path / "srun.sh").write_text(node_text(made, dict(enumerate(hosts))))

    def said(name: str, number: int) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": name, "SLURM_NODEID": str(number)}
        return subprocess.run(
            ["bash", str(tmp_path / "srun.sh")],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    assert [said(host.name, number).stdout for number, host in enumerate(hosts)] == [
        "node 0\n",
        "node 1\n",
        "node 2\n",
    ]
    assert said("b-1", 0).stdout == "node 2\n"
    assert (
        said("c-1", 0).returncode == 8
        and "c-1 is not a node of this session" in said("c-1", 0).stderr
    )


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="no scontrol here")
def test_names_with_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 23: jean-zay's perl cuts SLURM_JOB_NODELIST at the first '-', and MASTER_ADDR becomes
    "compute1"."""
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=vm\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "compute1-dy-queue1-i1-[1-3,10],login-2",
        "SLURM_RESTART_COUNT": "2",
    }
    found = current_allocation(variables)
    assert (
        found.hosts == (*(f"compute1-dy-queue1-i1-{n}" for n in (1, 2, 3, 10)), "login-2")
        and found.restarts == 2
    )
    chosen = job("jean-zay-7-5b")
    assert allocation_hosts(chosen, found).running[0].name == "compute1-dy-queue1-i1-1"
    with pytest.raises(ConfigError, match="wants 16 nodes, and allocation 7 has 5"):
        allocation_hosts(job("jean-zay-30b"), found)
    for outside in ({}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_NODELIST": "a"}):
        with pytest.raises(ConfigError, match="not an allocation of Slurm"):
            current_allocation(outside)


def test_how_long_before_the_limit(tmp_path: Path) -> None:
    """Twice a step of 20 s and a save of 400 s, and the minute in which Slurm looks."""
    run = RunFolder(tmp_path)
    chosen = job("jean-zay-7-5b")
    folder = run.checkpoints / "step-00000010"
    folder.mkdir(parents=True)
    for name, at in (("0.bin", 1000), ("manifest.json", 1400)):
        (folder / name).write_text("{}")
        os.utime(folder / name, (at, at))
    assert seconds_before_limit(run, chosen) == 300, "no step was seen yet"
    tokens = chosen.global_batch_size * chosen.model.seq_length
    run.metrics.write_text(
        "".join(
            json.dumps({"step": n, "lm_loss": 1.0, "tokens_per_second": tokens / 20}) + "\n"
            for n in range(1, 11)
        )
    )
    assert seconds_before_limit(run, chosen) == 2 * (400 + 20) + 60
    shutil.rmtree(run.checkpoints)
    assert seconds_before_limit(run, chosen) == 300, "no save was seen yet"


def test_what_the_record_says_of_the_queue(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "job" / "20261121-100000-abcd")
    (run.path / "launch").mkdir(parents=True)
    add_slurm_job(run, "12", first_attempt=1)
    waiting = read_run_record(run)
    assert waiting.state == "queued" and waiting.exit is None
    pending = JobStatus("12", "PENDING", "Priority", "2026-11-22T10:00:00", "1:00:00", "")
    assert (
        reconcile(waiting, pending) == waiting
        and pending.words() == "job 12 waits: Priority, expected to start 2026-11-22T10:00:00"
    )
    (run.path / "launch" / "slurm-12.out").write_text("bash: module: command not found\n")
    failed = reconcile(waiting, JobStatus("12", "FAILED", "NonZeroExitCode", "", "", "n1"))
    assert (
        failed.state == "failed"
        and failed.exit == 8
        and "module: command not found" in str(failed.root_cause)
    )
    assert read_run_record(run) == failed, "noted: Slurm forgets it"
    change_slurm_job(run, "12", ended={"state": "CANCELLED by 0", "message": "taken out"})
    assert (read_run_record(run).state, read_run_record(run).exit) == ("cancelled", 15)
    add_slurm_job(run, "13", first_attempt=1, follows="12")
    assert read_run_record(run).state == "queued" and [
        each.id for each in read_slurm_jobs(run)
    ] == [
        "12",
        "13",
    ]


def test_options_as_words() -> None:
    options: dict[str, Any] = {"exclusive": True, "requeue": False, "mem": 0, "time": "1:00"}
    assert sbatch.words(options) == ["--exclusive", "--mem=0", "--time=1:00"]
