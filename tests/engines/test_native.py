"""The command of trainkit's own trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.engines.native import Native, cpu_sharing
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.runs.folder import RunFolder


def environment_of(cluster: Cluster, **training: Any) -> dict[str, str]:
    model = Model(
        name="m", num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=9
    )
    job = Job(
        name="j",
        cluster=cluster,
        model=model,
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=1, lr=1.0, **training),
    )
    return dict(Native().command(job, RunFolder(Path("/r")), 1).env)


def test_cpu_ranks_share_the_cores_and_sleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert environment_of(Cluster(name="c", ranks_per_node=2)) == {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert environment_of(Cluster(name="c", ranks_per_node=10 * cores))["OMP_NUM_THREADS"] == "1"


def test_the_callers_own_wait_policy_stays_and_that_of_jobs_toml_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment_of(Cluster(name="c"))["OMP_WAIT_POLICY"] == "ACTIVE"
    assert (
        environment_of(Cluster(name="c", env={"OMP_WAIT_POLICY": "passive"}))["OMP_WAIT_POLICY"]
        == "passive"
    )
    assert cpu_sharing(1, {})["OMP_WAIT_POLICY"] == "PASSIVE"


def test_ranks_with_a_gpu_each_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment_of(
        Cluster(name="c", gpus_per_node=1, device=built_in_device("a100-sxm-40gb"))
    ) == {"OMP_NUM_THREADS": "1"}


def test_deterministic_kernels_of_cublas_need_a_workspace() -> None:
    gpus = Cluster(name="c", gpus_per_node=1, device=built_in_device("a100-sxm-40gb"))
    assert environment_of(gpus, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    own = gpus.model_copy(update={"env": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}})
    assert environment_of(own, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment_of(Cluster(name="c"), deterministic=True)
