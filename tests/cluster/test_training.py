"""Real training over two hosts with two ranks each: the losses of this machine alone,
undisturbed and through every kind of loss."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.test_endings import events
from tests.conftest import wait_for

STEPS = 120
LEASE, GRACE = 3.0, 1.0  # of the project


def write_jobs(project: ClusterProject) -> None:
    path = project.path / "jobs.toml"
    text = (
        path.read_text()
        .replace("train_iters = 30", f"train_iters = {STEPS}")
        .replace("save_interval = 5", "save_interval = 10")
    )
    path.write_text(
        text + '\n[clusters.here]\nranks_per_node = 4\nenv = { OMP_NUM_THREADS = "1"'
        ' }\n[jobs.alone]\nextends = "random"\ncluster = "here"\nnodes = 1\n'
    )


def step_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return max(
        (
            int(line.partition('"step": ')[2].partition(",")[0])
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ),
        default=0,
    )


def wait_for_steps(
    project: ClusterProject, process: subprocess.Popen[str], attempt: int, steps: int
) -> Path:
    """The third run's folder once this attempt has made so many steps."""

    def there() -> Path | None:
        if process.poll() is not None:
            pytest.fail("".join(process.communicate()))
        runs = project.runs()
        run = runs[-1]
        if (
            len(runs) < 3
            or not (run / "metrics.jsonl").exists()
            or not any(e["event"] == "go" for e in events(run, attempt))
        ):
            return None
        base = before.setdefault(attempt, step_of(run))
        return run if step_of(run) >= base + steps else None

    before: dict[int, int] = {}
    run = wait_for(there, f"{steps} steps of attempt {attempt}", timeout=600)
    assert isinstance(run, Path)
    return run


def ended(run: Path, attempt: int) -> dict[str, Any]:
    """The "ended" event of an attempt, once it is there."""
    found: dict[str, Any] = wait_for(
        lambda: next((e for e in events(run, attempt) if e["event"] == "ended"), None),
        f"the end of attempt {attempt}",
        timeout=600,
    )
    return found


@pytest.mark.slow
def test_losses_through_a_killed_rank_a_crashed_host_and_a_cut_network(
    head: ClusterProject, cluster: Cluster
) -> None:
    write_jobs(head)
    head.invoke("train", "alone")
    expected = head.losses(head.runs()[0])
    head.invoke("train", "random")  # over ssh, undisturbed
    assert head.losses(head.runs()[-1]) == expected

    head.hosts("node1 slots=2", "node2 slots=2", "node3 slots=2")
    process = head.start(
        "train", "random", "--set", "cluster.launcher=pdsh", "--set", "cluster.spares=1"
    )
    run = wait_for_steps(head, process, 1, 15)
    (victim,) = [
        p
        for p in cluster.processes_of(run.name)
        if p.mark == f"{run.name}/1/1/3" and "main.py" in " ".join(p.argv)
    ]
    cluster.kill(victim, number=signal.SIGKILL)
    end = ended(run, 1)
    assert (
        (end["class"], end["exit"]) == ("infra", 10)
        and end["root_cause"]["rank"] == 3
        and end["root_cause"]["signal"] == "SIGKILL"
    ), end

    wait_for_steps(head, process, 2, 15)
    cluster.crash("node2")
    end = ended(run, 2)
    assert end["class"] == "infra" and end["root_cause"]["host"] == "node2", end

    wait_for_steps(head, process, 3, 15)
    assert {p.host for p in cluster.processes_of(run.name) if p.started} == {
        "node1",
        "node3",
    }, "the spare has taken its place"
    cluster.cut("node3")
    end = ended(run, 3)
    assert end["class"] == "infra" and end["root_cause"]["host"] == "node3", end
    wait_for(
        lambda: not [p for p in cluster.processes_of(run.name) if p.host == "node3"],
        "the host that was cut off to stop by itself",
        timeout=600,
    )
    saved = max(
        int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-????????")
    )
    cluster.heal("node3")
    cluster.boot("node2")

    out, err = process.communicate()
    assert process.returncode == 0, out + err
    losses = head.losses(run)
    assert set(losses) == set(range(1, STEPS + 1)) and saved >= 20
    # the same layout gives the same bits; two ranks instead of four add in another order
    for step in range(1, saved + 1):
        assert losses[step] == expected[step], step
    assert losses == pytest.approx(expected, abs=1e-3)
    wait_for(lambda: not cluster.processes_of(run.name), "nothing to be left")
