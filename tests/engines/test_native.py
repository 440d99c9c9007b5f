"""The command of trainkit's own trainer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
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
    variables = {
        key: value
        for key, value in environment_of(Cluster(name="c", ranks_per_node=2)).items()
        if key.startswith("OMP_")
    }
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


# Rounds of tensors as torch allocates them, which live for a while, and of small objects, of which
# some stay. Prints KiB: the most that tensors had at a time, and what the process has grown by.
ROUNDS = """
import ctypes, random
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def tensor(kib):
    at = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(at), 64, 1024 * kib)
    libc.memset(at, 1, 1024 * kib)
    return at.value, kib

def resident():
    return 4 * int(open("/proc/self/statm").read().split()[1])

draw = random.Random(1)
objects, most, before = [], 0, resident()
for _ in range(100):
    tensors = []
    for _ in range(60):
        tensors.append(tensor(draw.choice((64, 96, 256, 768, 1024))))
        objects += [libc.malloc(draw.choice((24, 40, 56, 72, 88))) for _ in range(3)]
        most = max(most, sum(kib for _, kib in tensors))
        if len(tensors) > 30:
            libc.free(tensors.pop(draw.randrange(30))[0])
    for at, _ in tensors:
        libc.free(at)
    draw.shuffle(objects)
    while len(objects) > 400:
        libc.free(objects.pop())
print(most, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_the_heap_of_a_cpu_rank_keeps_what_is_freed_and_does_not_tear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `tcache_count` and `mxfast` it grows to 2.8 times what lives in it, or more."""
    without_settings_of_malloc(monkeypatch)
    settings = environment_of(Cluster(name="c"))["GLIBC_TUNABLES"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ROUNDS],
        env={**os.environ, "GLIBC_TUNABLES": settings},
        capture_output=True,
        text=True,
        check=True,
    )
    most, grown = map(int, done.stdout.split())
    assert most < grown < 2.6 * most


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_ones_own_settings_of_malloc_are_all_there_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    without_settings_of_malloc(monkeypatch)
    ours = environment_of(Cluster(name="c", env={name: "glibc.malloc.perturb=0"}))
    assert ours.get("GLIBC_TUNABLES", "glibc.malloc.perturb=0") == "glibc.malloc.perturb=0"
    monkeypatch.setenv(name, "1")
    assert "GLIBC_TUNABLES" not in environment_of(Cluster(name="c"))


def without_settings_of_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(name)


def test_ranks_with_a_gpu_each_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment_of(
        Cluster(name="c", gpus_per_node=1, device=built_in_device("a100-sxm-40gb"))
    ) == {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "256"}


def test_deterministic_kernels_of_cublas_need_a_workspace() -> None:
    gpus = Cluster(name="c", gpus_per_node=1, device=built_in_device("a100-sxm-40gb"))
    assert environment_of(gpus, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    own = gpus.model_copy(update={"env": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}})
    assert environment_of(own, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment_of(Cluster(name="c"), deterministic=True)
