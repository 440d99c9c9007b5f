"""One run through several layouts by the real tasks: killed, resumed in another, read by all
that reads checkpoints."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Project
from tests.launch.live_runs import rank_pids, slow_down, wait_for_step

STEPS = 24
PIPED = ("parallelism.pipeline_model_parallel_size=2",)
SPLIT = ("parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true")
TO_SPLIT = (
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.pipeline_model_parallel_size=1",
    "cluster.ranks_per_node=2",
)
TO_FOUR = (
    "cluster.ranks_per_node=4",
    "parallelism.pipeline_model_parallel_size=2",
    "parallelism.zero_stage=3",
    "training.micro_batch_size=1",
)


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def layout_of(run: Path, step: int) -> dict[str, Any]:
    return dict(
        json.loads((run / f"checkpoints/step-{step:08d}/manifest.json").read_text())["layout"]
    )


@pytest.mark.slow
def test_killed_in_one_layout_resumed_in_others(project: Project) -> None:
    """Two stages, then two tensor-parallel ranks, then four ranks of both and of data; losses
    are those of the run that nobody disturbed."""
    slow_down(project, STEPS)
    project.invoke("train", "random")
    expected = project.losses(project.runs()[0])
    kills = random.Random(os.getpid())
    process = project.start("train", "random", *sets(*PIPED))
    for attempt, (after, values) in enumerate(
        ((kills.randrange(5, 9), TO_SPLIT), (kills.randrange(11, 15), TO_FOUR)), start=1
    ):
        pids = rank_pids(project, attempt, runs=2)
        wait_for_step(project, after)
        for pid in (process.pid, *pids.values()):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=600)
        process = project.start("resume", "last", *sets(*values))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and " (failed) is at step " in out, out + err
    run = project.runs()[-1]
    assert project.losses(run) == pytest.approx(expected, rel=1e-5)
    checksums = [
        {row["step"]: row["batch_checksum"] for row in project.metrics(r) if "eval" not in row}
        for r in project.runs()
    ]
    assert checksums[0] == checksums[1]
    assert project.document("status", "last")["attempt"] == 3
    assert (
        layout_of(run, STEPS)["pipeline_model_parallel_size"] == 2
        and layout_of(run, STEPS)["world_size"] == 4
    )


@pytest.mark.slow
def test_what_reads_checkpoints_reads_those_of_any_layout(project: Project) -> None:
    """generate, evaluate and export of a run on one rank and of one on four, tensor-parallel in
    two stages: the same text, losses and weights."""
    few = ("training.train_iters=6", "training.save_interval=3")
    greedy = ("generate", "last", "--temperature", "0", "--max-new-tokens", "6")
    project.invoke("train", "text", *sets("cluster.ranks_per_node=1", *few))
    text, loss = project.document(*greedy)["text"], project.document("evaluate", "last")["loss"]
    project.invoke("export", "last", "--to", "alone")
    project.invoke(
        "train",
        "text",
        *sets("cluster.ranks_per_node=4", *PIPED, *SPLIT, "parallelism.zero_stage=3", *few),
    )
    assert layout_of(project.runs()[-1], 6)["world_size"] == 4
    assert (
        project.document(*greedy)["text"]
        == project.document(*greedy, "--tensor-parallel", "2")["text"]
        == text
    )
    for words in ((), ("--tensor-parallel", "2")):
        assert project.document("evaluate", "last", *words)["loss"] == pytest.approx(loss, rel=1e-5)
    project.invoke("export", "last", "--to", "apart")
    alone, apart = (
        load_file(project.path / name / "model.safetensors") for name in ("alone", "apart")
    )
    assert alone.keys() == apart.keys() and len(alone) > 20
    for name, weight in alone.items():
        torch.testing.assert_close(apart[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "code", "said"),
    [
        (
            (
                "parallelism.tensor_model_parallel_size=3",
                "parallelism.data_parallel_replicate_size=2",
                "training.global_batch_size=7",
            ),
            4,
            [
                "2 ranks are 2, which tensor-parallel 3",
                "num_attention_heads 2 does not divide by tensor-parallel size 3",
                "global_batch_size 7 does not",
            ],
        ),
        (
            ("parallelism.pipeline_model_parallel_size=2", "parallelism.zero_stage=2"),
            4,
            ["no ZeRO stage 2 under a pipeline"],
        ),
        (
            ("parallelism.pipeline_schedule='zbv'",),
            3,
            ["pipeline_schedule = 'zbv' needs pipeline_model_parallel_size above 1"],
        ),
        (
            (
                "parallelism.pipeline_model_parallel_size=2",
                "parallelism.virtual_pipeline_model_parallel_size=2",
            ),
            4,
            ["2 layers for 2 pipeline stages of 2"],
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_any_process(
    project: Project, values: tuple[str, ...], code: int, said: list[str]
) -> None:
    done = project.invoke("train", "random", *sets(*values), exit=code)
    for words in said:
        assert words in done.stderr, done.stderr
    assert not project.runs()


def test_a_run_is_not_resumed_in_a_layout_that_cannot_be(project: Project) -> None:
    project.invoke("train", "random", *sets("training.train_iters=2"))
    done = project.invoke(
        "resume",
        "last",
        *sets("parallelism.tensor_model_parallel_size=3", "training.train_iters=4"),
        exit=4,
    )
    assert "num_attention_heads 2 does not divide by tensor-parallel size 3" in done.stderr
    assert project.document("status", "last")["attempt"] == 1
