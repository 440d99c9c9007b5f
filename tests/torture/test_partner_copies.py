"""Hosts that are lost with the copies in their memory: ranks go on from what the partner host has,
bit-equal to a run that nobody touched."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.torture.conftest import Ranks, job_of
from tests.torture.faults import Fault
from tests.torture.test_disk import log_of
from tests.torture.test_kills import end_of
from tests.torture.test_memory_copies import KEEP, damage, kill_at
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint.partner import keeper_of

PIECES: Fault = {"at": "pieces", "bytes": 8192}  # of a copy


@given(st.integers(2, 200))
def test_each_host_keeps_one_other(nodes: int) -> None:
    keepers = [keeper_of(node, nodes) for node in range(nodes)]
    assert sorted(keepers) == list(range(nodes))
    assert all(keeper != node for node, keeper in enumerate(keepers))
    alone = [node for node, keeper in enumerate(keepers) if keepers[keeper] != node]
    assert len(alone) == 3 * (nodes % 2)


def pair(
    layout: str, tmp_path: Path, nodes: int, save_interval: int = 12
) -> tuple[RunFolder, RunFolder]:
    """A run that nobody touches, and one with a copy of every step on as many hosts. Both save at
    their end only, by default: how far behind a copy is when it has arrived depends on the machine,
    and a newer checkpoint would be gone on from."""
    left = job_of(layout, tmp_path / "left", keep=KEEP, save_interval=save_interval)
    keep = {**KEEP, "memory_interval": 1}
    killed = job_of(layout, tmp_path / "killed", keep=keep, save_interval=save_interval)
    ranks = killed.ranks_per_node // nodes
    cluster = killed.cluster.model_copy(update={"ranks_per_node": ranks})
    killed = killed.model_copy(update={"nodes": nodes, "cluster": cluster})
    return new_run(left), new_run(killed)


def lose_host(folder: Path, *ranks: int) -> None:
    """With its ranks its memory is gone."""
    for rank in ranks:
        for name in ("state", "partner"):
            (folder / f"{rank}.{name}").unlink(missing_ok=True)


def restored(run: RunFolder) -> dict[str, Any]:
    found = json.loads(run.attempt(1).restored.read_text())
    assert isinstance(found, dict)
    return found


def kill_everyone(run: RunFolder, ranks: Ranks, count: int, step: int, folder: Path) -> None:
    memory = {"TRAINKIT_MEMORY_FOLDER": str(folder)}
    kill = kill_at(run, step, slice(0, count))
    assert any(ranks.run(run, count, [PIECES], kill, more=memory))


@pytest.mark.parametrize(
    ("layout", "count", "nodes", "lost"),
    [
        pytest.param("DP2", 2, 2, (1,), marks=pytest.mark.slow),
        ("DP2 ZeRO 3, Muon", 2, 2, (0,)),
        pytest.param("PP2", 2, 2, (1,), marks=pytest.mark.slow),
        # stages of other sizes, of which the first and the last share weights; partners in a ring
        ("PP3", 3, 3, (1,)),
        pytest.param("TP2 x PP2", 4, 2, (2, 3), marks=pytest.mark.slow),
        ("HSDP 2x2 ZeRO 3, Muon", 4, 4, (1, 2)),
    ],
)
def test_the_state_of_a_lost_host_comes_from_its_partner(
    layout: str, count: int, nodes: int, lost: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """Once, and once more after it: what was fetched is a copy like others."""
    left, killed = pair(layout, tmp_path, nodes)
    assert ranks.run(left, count) == [0] * count
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    for step in (8, 10):
        kill_everyone(killed, ranks, count, step, tmp_path)
        lose_host(tmp_path, *lost)
    assert restored(killed)["source"] == "partner"
    assert ranks.run(killed, count, more=memory) == [0] * count, log_of(killed)
    found = restored(killed)
    assert found["source"] == "partner" and found["step"] >= 1, log_of(killed)
    assert facts(killed) == facts(left)
    assert end_of(killed) == end_of(left)


def test_of_two_partners_that_are_lost_together_the_disk_has_the_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    left, killed = pair("HSDP 2x2 ZeRO 3, Muon", tmp_path, 4, save_interval=6)
    assert ranks.run(left, 4) == [0] * 4
    kill_everyone(killed, ranks, 4, 9, tmp_path)
    lose_host(tmp_path, 2, 3)
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    assert ranks.run(killed, 4, more=memory) == [0] * 4, log_of(killed)
    assert restored(killed)["source"] == "disk"
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


@pytest.mark.parametrize("lost", [(1,), pytest.param((0,), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("part", "when", "call"),
    [
        ("ship", "before", 2),
        ("send", "before", 16),
        pytest.param("ship", "after", 2, marks=pytest.mark.slow),
        *(pytest.param("send", "before", n, marks=pytest.mark.slow) for n in (12, 21)),
    ],
)
def test_a_host_that_is_lost_in_a_transfer_leaves_the_one_before(
    part: str, when: str, call: int, lost: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """The second: before it, before its first piece, between two, before the one with the step, and
    after it. The first call of "send" says how long a slot is; then a copy has ten."""
    left, killed = pair("DP2", tmp_path, 2)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    fault: Fault = {"do": "kill", "at": part, "when": when, "call": call, "rank": lost[0]}
    assert -signal.SIGKILL in ranks.run(killed, 2, [PIECES, fault], more=memory)
    lose_host(tmp_path, *lost)
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    found = restored(killed)
    assert found["source"] == "partner" and found["step"] >= 1, log_of(killed)
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


@pytest.mark.parametrize("partner_too", [False, True])
def test_a_damaged_copy_of_ones_own_comes_from_the_partner(
    partner_too: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """And where the partner's is damaged too, the checkpoint is taken."""
    left, killed = pair("DP2", tmp_path, 2, save_interval=6 if partner_too else 12)
    assert ranks.run(left, 2) == [0, 0]
    kill_everyone(killed, ranks, 2, 9, tmp_path)
    damage(tmp_path / "1.state")
    if partner_too:
        damage(tmp_path / "0.partner")
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    assert restored(killed)["source"] == ("disk" if partner_too else "partner")
    assert "rank 1: the copy of step" in killed.attempt(1).log(1).read_text()
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


def test_a_partner_that_is_slow_keeps_no_step_waiting(ranks: Ranks, tmp_path: Path) -> None:
    """Steps are left out of the copies until it has the last one, and never two copies written
    that it lacks: what all have in common is never gone."""
    left, killed = pair("DP2", tmp_path, 2, save_interval=6)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    mark = tmp_path / "mark"
    hold: Fault = {
        "do": "sleep",
        "at": "ship",
        "when": "before",
        "call": 2,
        "rank": 1,
        "seconds": 600.0,
        "mark": str(mark),
    }
    kill = kill_at(killed, 10, slice(0, 2), mark)
    assert any(ranks.run(killed, 2, [hold], kill, more=memory))
    lose_host(tmp_path, 1)
    assert ranks.run(killed, 2, more=memory) == [0, 0], log_of(killed)
    # the second copy never arrived: the checkpoint of step 6 is newer than what both have
    assert restored(killed)["source"] == "disk" and restored(killed)["step"] == 6
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)


@pytest.mark.parametrize("call", [2, 16])
def test_a_line_that_is_cut_ends_no_training(call: int, ranks: Ranks, tmp_path: Path) -> None:
    """Nor does a copy that never arrives at the end of the run, when its peer has given up."""
    left, killed = pair("DP2", tmp_path, 2)
    assert ranks.run(left, 2) == [0, 0]
    memory = {"TRAINKIT_MEMORY_FOLDER": str(tmp_path)}
    cut: Fault = {"do": "cut", "at": "send", "when": "before", "call": call, "rank": 1}
    assert ranks.run(killed, 2, [PIECES, cut], more=memory) == [0, 0], log_of(killed)
    said = killed.attempt(1).log(1).read_text()
    assert "to rank 0, from 0: Connection closed by peer" in said, said
    assert facts(killed) == facts(left) and end_of(killed) == end_of(left)
