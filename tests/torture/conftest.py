"""Ranks to torture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests import forkserver
from tests.distributed import ROOT
from tests.once import once
from tests.torture.faults import Fault
from tests.train.layout_cases import layout, runs_here
from tests.train.support import new_run
from trainkit.jobs.experts import Experts
from trainkit.jobs.schema import (
    CheckpointSettings,
    Cluster,
    Dataset,
    Job,
    Model,
    Parallelism,
    Training,
)
from trainkit.runs.folder import RunFolder


class Layout(NamedTuple):
    """Where a job is trained, and by which optimizer.

    Args:
        ranks: of the whole world.
        parallelism: keys of the table.
        training: keys of the table.
        layers: of the model.
        experts: the model has some.
    """

    ranks: int
    parallelism: dict[str, Any]
    training: Mapping[str, Any] = MappingProxyType({"micro_batch_size": 4})
    layers: int = 2
    experts: bool = False


def by_muon(ranks: int, parallelism: dict[str, Any]) -> Layout:
    """With two chunks for each of two stages, and micro-batches for two data-parallel ranks."""
    return Layout(ranks, parallelism, {"micro_batch_size": 2, "optimizer": "muon"}, layers=4)


LAYOUTS = {
    "1": Layout(1, layout()),
    "DP2": Layout(2, layout()),
    "TP2": Layout(2, layout(2)),
    "PP2": Layout(2, layout(1, 2)),
    "TP2 x PP2": Layout(4, layout(2, 2)),
    # matrices lie on several ranks, or on each of several
    **{f"DP2 ZeRO {stage}, Muon": by_muon(2, layout(zero=stage)) for stage in range(4)},
    "HSDP 2x2 ZeRO 3, Muon": by_muon(4, layout(copies=2, zero=3)),
    "TP2 + SP, Muon": by_muon(2, layout(2, sp=True)),
    "PP2 1F1B, Muon": by_muon(2, layout(1, 2)),
    "PP2 interleaved, Muon": by_muon(2, layout(1, 2, "interleaved")),
    "PP2 ZBV, Muon": by_muon(2, layout(1, 2, "zbv")),
    "TP2 x PP2 x DP2, Muon": by_muon(8, layout(2, 2)),
    "DP2, EP2": Layout(2, layout(ep=2), experts=True),
    "TP2 + SP, EP2, Muon": by_muon(2, layout(2, sp=True, ep=2))._replace(experts=True),
    "PP3": Layout(3, layout(1, 3), layers=4),
}
LAYOUTS = {
    name: each
    for name, each in LAYOUTS.items()
    if runs_here(each.parallelism, experts=each.experts)
}
MODEL = Model(
    name="tiny", num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=61
)
WITH_EXPERTS = MODEL.model_copy(
    update={
        "family": "qwen3-moe",
        "moe": Experts(
            num_experts=4,
            router_topk=2,
            ffn_hidden_size=12,
            router_score_function="sigmoid",
            router_enable_expert_bias=True,
            router_bias_update_rate=0.01,
            router_load_balancing_type="seq_aux_loss",
            aux_loss_coeff=0.1,
        ),
    }
)
SAVE_INTERVAL = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    # the scale falls below the last chance before the first checkpoint, grows before the last one,
    # and falls again
    "fp16": {"initial_loss_scale": 2.0**22, "loss_scale_window": 3},
}


def job_of(
    name: str,
    root: Path,
    *,
    keep: dict[str, Any] | None = None,
    precision: str = "fp32",
    **training: Any,
) -> Job:
    """A job of 12 steps with evaluations and saves that do not fall together."""
    ranks, parallelism, keys, layers, experts = LAYOUTS[name]
    values: dict[str, Any] = {
        "global_batch_size": 8,
        "train_iters": 12,
        "lr": 1e-2,
        "lr_warmup_iters": 3,
        "eval_iters": 2,
    }
    values |= {
        "eval_interval": 4,
        "save_interval": SAVE_INTERVAL,
        "precision": precision,
        **PRECISIONS[precision],
        **keys,
        **training,
    }
    return Job(
        name="tiny",
        cluster=Cluster(name="here", ranks_per_node=ranks, root=str(root)),
        model=(WITH_EXPERTS if experts else MODEL).model_copy(update={"num_layers": layers}),
        dataset=Dataset(name="mock", source="mock", split="90,10,0"),
        parallelism=Parallelism(**parallelism),
        training=Training(**values),
        checkpoint=CheckpointSettings(
            **{"keep_last": 2, "keep_every": 6, "keep_best": 1, **(keep or {})}
        ),
    )


class Ranks:
    """Starts ranks in the zygote, one world at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the zygote is gone: {self._process.wait()}"
        return list(next(iter(json.loads(line).values())))

    def run(
        self,
        run: RunFolder,
        ranks: int,
        faults: list[Fault] | None = None,
        during: Callable[[list[int]], None] = lambda pids: None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> list[int]:
        """Exit codes of the ranks, a signal as its negative number. `during`: told their process
        ids as soon as they run; `more`: of their environment."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps(
                {
                    "run": str(run.path),
                    "ranks": ranks,
                    "faults": faults or [],
                    "environment": dict(more),
                }
            )
            + "\n"
        )
        self._process.stdin.flush()
        during(self._answer())
        return self._answer()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The zygote, shared by all tests."""
    argv = [sys.executable, "-m", "tests.torture.zygote"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = forkserver.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield Ranks(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(600)


@pytest.fixture(scope="session")
def reference(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two ranks that nothing befalls, which saves in training's way and keeps all. It is
    all workers': copy it before changing it."""

    def make(folder: Path) -> RunFolder:
        run = new_run(job_of("DP2", folder, keep={"keep_last": 9}))
        assert ranks.run(run, 2) == [0, 0]
        return run

    return once(tmp_path_factory, "torture", make)
