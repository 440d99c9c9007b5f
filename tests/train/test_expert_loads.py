"""Loads of experts in a run's files: as routers sent rows, over kill and resume, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import Project, wait_for
from tests.distributed import finish, run_ranks
from tests.train.plain_loop import job_of
from tests.train.starved import STARVED
from tests.train.support import new_run, start_ranks
from trainkit.runs.expert_loads import (
    CELLS,
    MOST,
    RECENT,
    ExpertLoads,
    ExpertLoadsLog,
    expert_loads_path,
    loads_now,
    read_expert_loads,
    thinned,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows

HANGS = 600  # seconds; only against hanging
# 16 choices a layer and step for 64 experts: most get none, whatever the router does; an expert
# takes one of a sample, and 4 tokens that choose alike lose some
SPARSE = """
[models.sparse]
family = "olmoe"
num_layers = 3
hidden_size = 16
num_attention_heads = 2
seq_length = 4
vocab_size = 128
moe.num_experts = 64
moe.router_topk = 2
moe.ffn_hidden_size = 8
moe.first_dense_layers = 1
moe.expert_capacity_factor = 1.0

[jobs.sparse]
cluster = "here"
model = "sparse"
dataset = "mock"
training.micro_batch_size = 1
training.global_batch_size = 2
training.train_iters = 2
training.lr = 1e-2
training.eval_iters = 1
"""


def test_rows_tell_what_routers_sent(tmp_path: Path) -> None:
    """Of two ranks with several micro-batches each, over the steps of a row."""
    folder, sent = run_ranks(2, "tests.train.starved:watched", tmp_path)[0]
    run, loads_NLE = RunFolder(folder), np.array(sent)
    assert loads_NLE[:, 1:].sum((1, 2)).tolist() == [4 * 2 * 8 * 16] * 5
    lines = read_expert_loads(run)
    assert [(line.step, line.steps) for line in lines] == [(2, 2), (4, 2), (5, 1)]
    rows = [row for row in read_rows(run.metrics) if "eval" not in row]
    for line, row, steps in zip(lines, rows, ((0, 1), (2, 3), (4,)), strict=True):
        loads_LE = loads_NLE[[*steps]].sum(0)
        assert line.loads_LE.tolist() == loads_LE.tolist()
        ratios = [[load / (sum(layer) / 8) for load in layer] for layer in loads_LE[1:].tolist()]
        most = [max(layer) for layer in ratios]
        table = row["experts"]
        assert table["load_most"] == pytest.approx(max(most))
        assert table["layer"] == 1 + most.index(max(most))
        away = [abs(ratio - 1) for layer in ratios for ratio in layer]
        assert table["load_deviation"] == pytest.approx(sum(away) / len(away))
        assert table["dead"] == sum(ratio == 0 for layer in ratios for ratio in layer) >= 1
        assert STARVED in line.dead()
    board = EventAccumulator(str(run.tensorboard)).Reload()
    seen = [(event.step, event.value) for event in board.Scalars("expert-dead")]
    assert seen == [(row["step"], row["experts"]["dead"]) for row in rows]


def steps(run: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in expert_loads_path(run).read_bytes().splitlines()]


def test_killed_and_resumed_has_each_step_once(tmp_path: Path) -> None:
    """With the same bits of loss and gradients, which hang on the loads of the step before."""
    made: dict[str, Any] = {
        "micro_batch_size": 4,
        "train_iters": 12,
        "save_interval": 5,
        "eval_iters": 0,
    }
    whole = new_run(job_of("moe-global", 1, tmp_path / "whole", {}, **made))
    assert finish(start_ranks(whole, 1), HANGS) == [0]
    broken = new_run(job_of("moe-global", 1, tmp_path / "broken", {}, **made))
    children = start_ranks(broken, 1)
    wait_for(lambda: expert_loads_path(broken).exists() and len(steps(broken)) >= 7, "step 7")
    children[0].kill()
    finish(children, HANGS)
    with open(expert_loads_path(broken), "a") as file:
        file.write('{"step": 99, "steps": 1')
    assert finish(start_ranks(broken, 1), HANGS) == [0]
    assert steps(broken) == list(range(1, 13))
    assert expert_loads_path(broken).read_bytes() == expert_loads_path(whole).read_bytes()
    tables = [
        [(row.get("experts"), row["lm_loss"], row["grad_norm"]) for row in read_rows(run.metrics)]
        for run in (broken, whole)
    ]
    assert tables[0] == tables[1] and all(table[0] for table in tables[0])


def loads(step: int, *, steps: int = 10) -> ExpertLoads:
    return ExpertLoads(step, steps, np.array([[step, 1], [0, 0]]), np.zeros(2, np.int64))


def test_the_file_stays_small_and_even(tmp_path: Path) -> None:
    """Whatever the run's length: the newest lines as they were, the others far apart."""
    path = tmp_path / "expert-loads.jsonl"
    log = ExpertLoadsLog(path, -1)
    for step in range(10, 20_001, 10):
        log.note(loads(step))
        assert path.read_bytes().count(b"\n") <= MOST
    lines = read_expert_loads(RunFolder(tmp_path))
    newest = [line.step for line in lines[-RECENT:]]
    assert newest == list(range(20_010 - 10 * RECENT, 20_001, 10))
    even = thinned(lines)
    apart = np.diff([line.step for line in even])
    assert even[0].step == 10 and CELLS / 2 <= len(even) <= CELLS
    assert apart[:-1].max() <= 2 * apart.min()
    now = loads_now(lines)
    assert now is not None and (now.step, now.steps) == (20_000, 100)
    ExpertLoadsLog(path, 19_990)
    assert read_expert_loads(RunFolder(tmp_path))[-1].step == 19_990
    assert not read_expert_loads(RunFolder(tmp_path / "dense"))


def test_lines_of_steps_that_come_again(tmp_path: Path) -> None:
    """An attempt that was taken for dead still writes: later lines count."""
    log = ExpertLoadsLog(tmp_path / "expert-loads.jsonl", -1)
    for step in (10, 20, 30, 20, 30):
        log.note(loads(step))
    assert [line.step for line in read_expert_loads(RunFolder(tmp_path))] == [10, 20, 30]


def test_lines_of_older_versions_have_nothing_dropped(tmp_path: Path) -> None:
    path = tmp_path / "expert-loads.jsonl"
    path.write_text('{"step":3,"steps":1,"loads":[[0,0],[4,2]]}\n')
    (line,) = read_expert_loads(RunFolder(tmp_path))
    assert line.dropped_L.tolist() == [0, 0] and line.row()["dropped"] == 0


def test_a_disk_that_fails_costs_lines_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ExpertLoadsLog(tmp_path / "gone" / "expert-loads.jsonl", -1)
    for step in range(1, MOST + 3):
        log.note(loads(step))
    assert capsys.readouterr().err.count("WARNING: no loads of experts: ") == 1


def test_people_hear_of_dead_experts(project: Project) -> None:
    """By the log, `status` and the page; nothing where no loads were logged."""
    project.add_to_jobs(SPARSE)
    project.invoke("train", "sparse")
    (run,) = (project.path / "runs" / "sparse").iterdir()
    now = loads_now(read_expert_loads(RunFolder(run)))
    assert now is not None and now.layers == [1, 2] and now.steps == 2
    dead = [
        (layer, expert)
        for layer in (1, 2)
        for expert in range(64)
        if not now.loads_LE[layer, expert]
    ]
    named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in dead[:8])
    words = f"Experts without a row in 2 steps up to step 2: {named}, and {len(dead) - 8} more"
    log = RunFolder(run).attempt(1).log(0).read_text()
    for row in read_rows(RunFolder(run).metrics):
        assert "eval" in row or f" dead experts: {row['experts']['dead']:.0f} |" in log
    said = project.invoke("status", "last").stdout
    assert words in said and "aux_loss_coeff" in said and "router_enable_expert_bias" in said
    share, layer, there = now.dropped()
    assert share == now.dropped_L.sum() / (2 * 2 * 16) and 0 < share <= there == max(
        now.dropped_L / (2 * 16)
    )
    drops = f"in 2 steps up to step 2: {share:.2%} of all, {there:.2%} in layer {layer}; in [models"
    assert drops in said and "expert_capacity_factor" in said
    value: Any = project.document("status", "last")["experts"]
    assert value == {
        "step": 2,
        "steps": 2,
        "dead": [{"layer": layer, "expert": expert} for layer, expert in dead],
        "dropped": share,
    }
    project.invoke("report", "last", "--html", "r.html")
    page = (project.path / "r.html").read_text()
    most = now.loads_LE[1:] / now.loads_LE[1:].mean(1, keepdims=True)
    at, expert = np.unravel_index(most.argmax(), most.shape)
    assert drops in page
    assert words in page and f"layer {at + 1} expert {expert} ({most.max():.2f})" in page
    maps = page.split("<h2>Experts</h2>")[1].split("<h2>")[0]
    assert maps.count('class="heat"') == 2 and maps.count('class="h0"') == 2
    cells = maps.split('class="h0" d="')[1].split('"')[0].count("M")
    assert len(dead) <= cells  # all of them in the darkest colour
    expert_loads_path(RunFolder(run)).unlink()
    assert "experts" not in project.document("status", "last")
