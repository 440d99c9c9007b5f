"""Attempts that follow a rank's end under the agents that are there, by the real tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.conftest import Project, alive, wait_for
from tests.launch.live_runs import events, rank_pids, slow_down, wait_for_step

RETRIES = "\nretry = { infra = 5, same_step = 10 }\n"


def parent_of(pid: int) -> int:
    """The process that waits for it (proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))


def test_killed_ranks_start_again_under_the_same_agent(project: Project) -> None:
    slow_down(project, 40)
    project.invoke("train", "random")
    expected = project.losses(project.runs()[0])
    project.add_to_jobs(RETRIES)
    process = project.start("train", "random")
    agents = []
    for attempt, victim in ((1, 1), (2, 0)):
        pids = rank_pids(project, attempt, runs=2)
        agents.append({parent_of(pid) for pid in pids.values()})
        wait_for_step(project, 8 * attempt)
        os.kill(pids[victim], signal.SIGKILL)
    pids = rank_pids(project, 3, runs=2)
    agents.append({parent_of(pid) for pid in pids.values()})
    out, err = process.communicate(timeout=600)
    run = project.runs()[-1]
    assert process.returncode == 0, out + err
    assert len(agents[0]) == 1 and agents[0] == agents[1] == agents[2], agents
    assert project.losses(run) == expected
    assert not any(alive(pid) for pid in agents[0])
    ends = [next(e for e in events(run, n) if e["event"] == "ended") for n in (1, 2)]
    assert [e["survivors"] for e in ends] == [[], []] and not ends[0]["unanswered"]
    assert (run / "launch/attempt-3/session.json").samefile(run / "launch/attempt-1/session.json")


def test_cold_recovery_starts_another_agent(project: Project) -> None:
    slow_down(project)
    project.add_to_jobs('\nrecovery = "cold"' + RETRIES)
    process = project.start("train", "random")
    pids = rank_pids(project)
    agent = parent_of(pids[0])
    wait_for_step(project, 1)
    os.kill(pids[1], signal.SIGKILL)
    again = rank_pids(project, 2)
    assert parent_of(again[0]) != agent and not alive(agent)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)


def test_an_end_without_a_retry_leaves_no_agent(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    pids = rank_pids(project)
    agent = parent_of(pids[0])
    wait_for_step(project, 1)
    os.kill(pids[1], signal.SIGKILL)
    process.communicate(timeout=600)
    assert process.returncode == 10 and not alive(agent)
    ended = next(e for e in events(project.runs()[-1]) if e["event"] == "ended")
    assert ended["survivors"] == [] and ended["unanswered"] == []


def test_ctrl_c_while_a_rank_parent_imports_ends_the_run(project: Project) -> None:
    slow_down(project)
    process = project.start("train", "random")
    wait_for(lambda: any("agent_joined" in text for text in told(project)), "the agent")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 130
    ended = next(e for e in events(project.runs()[-1]) if e["event"] == "ended")
    assert ended["survivors"] == [] and ended["unanswered"] == []


def told(project: Project) -> list[str]:
    """Events of the first attempt so far, as they are written."""
    return [path.read_text() for path in project.path.glob("runs/*/*/attempts/1/events.jsonl")]
