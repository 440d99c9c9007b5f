"""The command of trainkit's own trainer."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.process import cpu_sharing, on_this_node
from trainkit.engines.native import TORCH, Native, torch_problem
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.ops.build import torch_version
from trainkit.runs.folder import RunFolder


def job_on(cluster: Cluster, **training: Any) -> Job:
    model = Model(
        name="m", num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=9
    )
    return Job(
        name="j",
        cluster=cluster,
        model=model,
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=1, lr=1.0, **training),
    )


def environment_of(cluster: Cluster, **training: Any) -> dict[str, str]:
    return dict(Native().command(job_on(cluster, **training), RunFolder(Path("/r")), 1).env)


def test_the_releases_of_torch_are_pyprojects_and_among_them_is_this_one() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert TORCH in project["project"]["dependencies"]
    assert torch_problem(torch_version()) == ""


@pytest.mark.parametrize("version", ["2.10.0+cu126", "2.99.0", "3.0.0a0+git1234"])
def test_another_torch_is_refused_where_ranks_run_with_this_python(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("trainkit.engines.native.torch_version", lambda: version)
    (problem,) = Native().problems(job_on(Cluster(name="c")))
    assert problem.message == (
        f"torch {version} was not tried with this version of trainkit, which takes {TORCH}"
    )
    elsewhere = Cluster(name="c", launcher="ssh", python="/opt/py/bin/python3", root="/mnt/x")
    assert Native().problems(job_on(elsewhere)) == []


def test_cpu_ranks_share_the_cores_and_sleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    variables = environment_of(Cluster(name="c", ranks_per_node=2))
    for cores in (1, 5, 16):  # of the node that the ranks run on
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert on_this_node(variables) == {
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "OMP_WAIT_POLICY": "PASSIVE",
        }


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
