"""A sweep on this machine: in turn, resumed, with a run that diverges; its table and its winner."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.conftest import HANGS, Project, wait_for
from trainkit.base.errors import ConfigError
from trainkit.base.slots import reserve_slots
from trainkit.experiment.sweep import run as turns
from trainkit.experiment.sweep.opened import opened_sweep
from trainkit.experiment.sweep.results import results_of
from trainkit.experiment.sweep.run import (
    SweepOptions,
    places_of,
    run_sweep,
)
from trainkit.jobs.load import load
from trainkit.jobs.local_jobs import add_job
from trainkit.launch.hosts.selection import local_hosts
from trainkit.launch.preparation import StageUi
from trainkit.launch.stage_lines import StageLines
from trainkit.launch.supervise.rank_environment import visible_devices
from trainkit.reports.sweep import MemberResult, SweepResults
from trainkit.reports.sweep_page import sweep_page

SWEEP = "\n[jobs.random.sweep]\ngrid.training.lr = [1e-2, 1e18, 1e-3]\n"
SHORT = "training.train_iters = 30\ntraining.lr = 1e-2\ntraining.eval_iters = 1\n"


# a program that writes down what it is told, and a server that takes a message and never answers
NOTIFY = """
[notify]
command = ["tee", "-a", "{path}"]
webhook_variable = "HOOK"
timeout = 3.0
"""


def shorten(project: Project) -> None:
    """One rank, and three steps."""
    text = (project.path / "jobs.toml").read_text() + SWEEP
    text = text.replace("ranks_per_node = 2", "ranks_per_node = 1")
    short = SHORT.replace("30", "3") + "log_interval = 1\n".replace("log_", "training.log_")
    notify = NOTIFY.format(path=project.path / "told")
    text = notify + text.replace(SHORT, short).replace("eval_interval = 10", "eval_interval = 3")
    (project.path / "jobs.toml").write_text(text)


def test_killed_and_gone_on_with(project: Project) -> None:
    """The process of the sweep is killed while its first run goes on: that run is not lost and not
    made twice. One that diverges ends alone."""
    shorten(project)
    silent = socket.create_server(("127.0.0.1", 0))
    hook = f"http://127.0.0.1:{silent.getsockname()[1]}/hook-of-a-chat"
    first = project.start("sweep", "random", HOOK=hook)
    wait_for(lambda: bool(project.runs()), "the first run", timeout=HANGS)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    options = ("--html", "s.html", "--best", "validation_loss")
    done = project.invoke("sweep", "random", *options, "--json", timeout=HANGS, HOOK=hook)
    value = json.loads(done.stdout)
    states = [member["state"] for member in value["members"]]
    assert states == ["succeeded", "diverged", "succeeded"]
    assert [member["run"] for member in value["members"]] == [run.name for run in project.runs()]
    assert value["members"][1]["why"].startswith("step 2: lm loss nan")
    for member, run in zip(value["members"], project.runs(), strict=True):
        job = json.loads((run / "job.json").read_text())["job"]
        assert job["training"]["lr"] == member["values"]["training.lr"]
    best = min((value["members"][0], value["members"][2]), key=lambda m: m["validation_loss"])
    winner = load(project.path).resolve("random-best").job
    assert winner.training.lr == best["values"]["training.lr"]
    assert "diverged" in (project.path / "s.html").read_text()
    told = (project.path / "told").read_text().splitlines()
    assert [("failed" in line, "finished" in line) for line in told] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    for path in (path for run in project.runs() for path in run.rglob("*") if path.is_file()):
        assert b"hook-of-a-chat" not in path.read_bytes(), path
    silent.close()
    again = project.document("sweep", "random")
    assert again["sweep"] == value["sweep"] and len(project.runs()) == 3, "nothing is left to do"
    refused = project.invoke("sweep", "random", "--show", "--best", "validation_loss", exit=3)
    assert "there is a job of that name" in refused.stderr


def test_what_best_may_be_is_known_before_anything_trains(project: Project) -> None:
    shorten(project)
    nobody = "http://127.0.0.1:9/nobody"
    words = ("sweep", "random", "--best", "validation_los")
    refused = project.invoke(*words, exit=3, timeout=HANGS, HOOK=nobody)
    assert "--best validation_los: expected one of training_loss, val" in refused.stderr
    assert not (project.path / "sweeps").exists()


def test_new_begins_again_beside_a_record_that_is_damaged(project: Project) -> None:
    project.add_to_jobs(SWEEP)
    damaged = project.path / "sweeps/random/20200101-000000-0000/sweep.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    with opened_sweep(load(project.path), "random", [], new=True) as found:
        assert found.record.folder != damaged.parent and len(found.record.members) == 3


def test_waits_for_a_host_that_another_run_holds(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members are not used up one after another meanwhile."""
    shorten(project)
    monkeypatch.setattr(turns, "BUSY_SECONDS", 0.5)
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/nobody")
    held = reserve_slots(project.path / "node", ["cpu"], {"run": "another"})
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "waits for the hosts" in line:
            held.release()

    with opened_sweep(load(project.path), "random", [], new=False) as found:
        results = results_of(run_sweep(found, StageUi(StageLines(say), say), SweepOptions()))
    assert sum("waits for the hosts" in line for line in said) == 1
    assert [m.state for m in results.members] == ["succeeded", "diverged", "succeeded"]
    assert len(project.runs()) == 3


def test_what_cannot_be_swept(project: Project) -> None:
    assert "job random has no sweep" in project.invoke("sweep", "random", exit=3).stderr
    with (project.path / "jobs.toml").open("a") as file:
        file.write("\n[jobs.random.sweep]\ngrid.training.lrr = [1e-3]\ngrid.nodes = [1]\n")
    wrong = project.invoke("sweep", "random", "--dry-run", exit=3)
    assert "lrr=0.001" in wrong.stderr and "training.lrr" in wrong.stderr
    assert project.runs() == []


def test_the_winner_s_model_is_a_table_of_its_own(project: Project) -> None:
    values = {"training.lr": 5e-4, "model.hidden_size": 64, "training.seed": 3}
    add_job(load(project.path), "wide", "random", values, "a test")
    job = load(project.path).resolve("wide").job
    assert (job.model.name, job.model.hidden_size) == ("wide", 64)
    assert (job.training.lr, job.training.seed) == (5e-4, 3)
    assert load(project.path).resolve("random").job.model.hidden_size == 32


def member(number: int, lr: float, seed: int, loss: float | None) -> MemberResult:
    state = "succeeded" if loss is not None else "diverged"
    values = {"training.lr": lr, "training.seed": seed}
    return MemberResult(number, values, f"run{number}", state, 3, loss, loss)  # type: ignore[arg-type]


def test_the_best_is_a_mean_over_seeds(tmp_path: Path) -> None:
    """A point of which one seed diverged cannot win, however good the others are."""
    members = [
        member(1, 1e-2, 1, 1.0),
        member(2, 1e-2, 2, None),
        member(3, 1e-3, 1, 2.0),
        member(4, 1e-3, 2, 3.0),
        member(5, 1e-4, 1, 2.9),
        member(6, 1e-4, 2, 2.9),
    ]
    results = SweepResults("id", "job<b>", tmp_path, members)
    best = results.best("training_loss")
    assert best.values == {"training.lr": 1e-3} and best.members == [3, 4]
    assert best.mean["training_loss"] == 2.5
    assert best.deviation["training_loss"] == pytest.approx(0.7071, rel=1e-3)
    # Student's t of one degree of freedom, 12.706, times the deviation over the root of two
    assert best.interval["training_loss"] == pytest.approx(6.353, rel=1e-3)
    with pytest.raises(ConfigError, match="has succeeded with a tokens per second"):
        results.best("tokens_per_second")
    rows = {1: [{"step": 1, "consumed_samples": 8, "lm_loss": 1.0}]}
    page = sweep_page(results, rows)  # type: ignore[arg-type]
    assert "job&lt;b&gt;" in page and "Over seeds" in page and "2.5 ± 6.353" in page


def test_places_do_not_overlap(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (project.path / "jobs.toml").read_text()
    hosts = "\n".join(f"node{number} slots=2" for number in range(5))
    (project.path / "hosts").write_text(hosts + "\n")
    clusters = (
        '\n[clusters.gpus]\ngpus_per_node = 8\nranks_per_node = 3\ndevice = "h100-sxm-80gb"\n'
        '[clusters.hosts]\nlauncher = "ssh"\nhostfile = "hosts"\nranks_per_node = 2\n'
    )
    (project.path / "jobs.toml").write_text(text + clusters)
    jobs = load(project.path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    eight = jobs.resolve("random", ['cluster="gpus"']).job
    gpus = places_of([eight])
    assert [list(place.devices) for place in gpus] == [["0", "1", "2"], ["3", "4", "5"]]
    with gpus[1].entered():
        assert visible_devices(eight, local_hosts(eight).hosts[0]) == ["3", "4", "5"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1,0,2")
    assert [list(place.devices) for place in places_of([eight])] == [
        ["7", "5", "3"],
        ["1", "0", "2"],
    ]
    pair = [jobs.resolve("random", ['cluster="hosts"', "nodes=2"]).job]
    assert [place.include for place in places_of(pair)] == ["node0@node1", "node2@node3"]
    here = places_of([jobs.resolve("random").job])
    assert [(place.include, place.devices) for place in here] == [("", ())]
