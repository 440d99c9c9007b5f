"""Checkpoint bytes and times against published ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.example import BIG, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Training
from trainkit.plan.arithmetic import parameters_of
from trainkit.plan.planner import PreparedData, make_plan
from trainkit.plan.storage import (
    GIB,
    checkpoint_bytes,
    checkpoints_on_disk,
    checkpoints_written,
    write_seconds,
)

TIB = 2**40


def training(**keys: Any) -> Training:
    return Training.model_validate({"train_iters": 100, "lr": 1.0, **keys})


def test_bytes_per_parameter() -> None:
    def size(engine: str = "native", **keys: Any) -> float:
        job = job_of(engine=engine, **keys)
        return checkpoint_bytes(job, ENGINES[engine].rules, 512) / parameters_of(job.model, 512)

    for name in ("megatron-lm", "gpt-neox", "nemo"):
        assert size(name, precision="fp16") == size(name, precision="bf16") == 14
        assert size(name, precision="fp32") == 12
    assert size(precision="bf16") == 12
    assert size(optimizer="sgd", precision="bf16") == 8
    assert size(optimizer="sgd", sgd_momentum=0.0, precision="bf16") == 4


def test_published_sizes() -> None:
    """GPT-NeoX-20B: "268GB" by du, which counts GiB (README of GPT-NeoX). BLOOM-176B: 2.244 TiB,
    "2.3T" by du, which rounds up (BigScience's chronicles)."""
    neox = parameters_of(shape("gpt-neox", 44, 6144, 64, 2048), 50432)
    assert 14 * neox / GIB == pytest.approx(268.0, abs=0.05)
    bloom = 176.247e9
    assert 14 * bloom / TIB == pytest.approx(2.244, abs=5e-4)


@pytest.mark.parametrize(
    ("gib_per_second", "minutes"), [(19.2, 2.04), (64, 0.61), (128, 0.31), (256, 0.15)]
)
def test_published_times(gib_per_second: float, minutes: float) -> None:
    """Azure's table for AMLFS 40, 125, 250 and 500: 2.3 TiB at GiB/s."""
    assert write_seconds(2.3 * TIB, gib_per_second) / 60 == pytest.approx(minutes, abs=0.005)


def test_how_many_there_are() -> None:
    assert [checkpoints_written(training(save_interval=n)) for n in (None, 30, 50, 100, 1000)] == [
        1,
        4,
        2,
        1,
        1,
    ]
    job = job_of(train_iters=100, save_interval=10, checkpoint={"keep_last": 3})
    assert checkpoints_on_disk(job, ENGINES["native"].rules) == 4  # one more while it is written
    assert checkpoints_on_disk(job, ENGINES["megatron-lm"].rules) == 10  # it deletes none
    assert (
        checkpoints_on_disk(
            job_of(train_iters=20, save_interval=10, checkpoint={"keep_last": 5}),
            ENGINES["native"].rules,
        )
        == 2
    )
    assert (
        checkpoints_on_disk(
            job_of(
                train_iters=20, save_interval=10, checkpoint={"keep_last": 5, "save_first": True}
            ),
            ENGINES["native"].rules,
        )
        == 3
    )


def tiers(**sizes: int) -> dict[str, Any]:
    return {
        "filesystems": {
            name: {"capacity_bytes": size, "write_gib_per_second": 0.5}
            for name, size in sizes.items()
        }
    }


def test_more_checkpoints_than_the_disk_holds() -> None:
    keys: dict[str, Any] = {"train_iters": 100, "save_interval": 10}
    size = make_plan(job_of(**keys)).checkpoint_bytes
    assert size is not None
    fits = make_plan(job_of(**keys, cluster=tiers(fast=6 * size), checkpoint={"keep_last": 5}))
    assert (
        not fits.objections
        and fits.storage
        and fits.storage.filesystem == "fast"
        and fits.storage.write_seconds == size / (GIB / 2)
    )
    (objection,) = make_plan(
        job_of(**keys, cluster=tiers(fast=4 * size), checkpoint={"keep_last": 5})
    ).objections
    assert (objection.code, objection.key, objection.changes) == (
        "disk-too-small",
        "checkpoint.keep_last",
        ({"checkpoint.keep_last": 3},),
    )
    assert not make_plan(
        job_of(**keys, cluster=tiers(fast=4 * size), checkpoint={"keep_last": 3})
    ).objections
    few = {"keep_last": 5}  # three are ever written, and not one of them fits
    (short,) = make_plan(
        job_of(train_iters=3, save_interval=1, cluster=tiers(fast=size - 1), checkpoint=few)
    ).objections
    assert short.message.endswith("0.024 MiB are needed") and not short.changes
    (none,) = make_plan(job_of(**keys, cluster=tiers(fast=size // 2))).objections
    assert none.code == "disk-too-small" and not none.changes
    every = {"keep_last": 3, "keep_every": 20}  # five of every 20 steps stay, and keep_last others
    (kept,) = make_plan(job_of(**keys, cluster=tiers(fast=7 * size), checkpoint=every)).objections
    assert kept.key == "checkpoint.keep_last" and kept.changes == ({"checkpoint.keep_last": 1},)
    megatron = job_of(**keys, engine="megatron-lm", cluster=tiers(fast=9 * 2 * size))
    (all_stay,) = make_plan(megatron, rules=ENGINES["megatron-lm"].rules).objections
    assert all_stay.key == "training.save_interval" and "deletes none" in all_stay.message


def test_which_file_system() -> None:
    two = tiers(fast=1, large=10**12)
    assert [
        o.code for o in make_plan(job_of(cluster=two, checkpoint={"filesystem": "fast"})).objections
    ] == ["disk-too-small"]
    assert not make_plan(job_of(cluster=two, checkpoint={"filesystem": "large"})).objections
    unnamed = make_plan(job_of(cluster=two))
    assert not unnamed.objections and [note.code for note in unnamed.notes] == [
        "filesystem-not-named"
    ]
    (wrong,) = make_plan(job_of(cluster=two, checkpoint={"filesystem": "tape"})).objections
    assert wrong.code == "no-such-filesystem" and "known: fast, large" in wrong.message


def test_the_disk_here() -> None:
    assert [
        o.code for o in make_plan(job_of(), prepared=PreparedData(free_bytes=10)).objections
    ] == ["disk-too-small"]
    assert not make_plan(job_of(), prepared=PreparedData(free_bytes=10**9)).objections


def test_the_file_system_below_which_runs_lie() -> None:
    """Where none is named, that whose path holds the cluster's root; one that is named and
    mounted elsewhere is worth a word."""
    mounted = {
        "home": {"path": "/home", "write_gib_per_second": 0.1},
        "fsx": {"path": "/fsx"},
        "fast": {"path": "/fsx/fast", "write_gib_per_second": 9.0},
    }

    def found(root: str, **keys: Any) -> tuple[str | None, list[str]]:
        plan = make_plan(job_of(cluster={"filesystems": mounted, "root": root}, **keys))
        assert plan.storage is not None
        return plan.storage.filesystem, [note.code for note in plan.notes]

    assert (
        found("/fsx/fast/me") == ("fast", [])
        and found("/fsx/faster") == ("fsx", [])
        and found("/home/me") == ("home", [])
    )
    assert found("/scratch") == (None, ["filesystem-not-named"])
    assert found("/home/me", checkpoint={"filesystem": "fast"}) == ("fast", ["root-elsewhere"])


def test_reading_a_checkpoint_takes_as_long_as_the_file_system_says() -> None:
    def seconds(**keys: float) -> float | None:
        plan = make_plan(job_of(cluster={"filesystems": {"disk": keys}}))
        assert plan.storage is not None
        return plan.storage.read_seconds

    plan = make_plan(job_of())
    assert seconds(read_gib_per_second=2.0, write_gib_per_second=1.0) == pytest.approx(
        (plan.checkpoint_bytes or 0) / (2 * GIB)
    )
    assert (
        seconds(write_gib_per_second=1.0) == pytest.approx((plan.checkpoint_bytes or 0) / GIB)
        and seconds() is None
    )


def test_a_job_that_switches_checkpoints_off_writes_none() -> None:
    """AWS's benchmarks with NeMo; neuron's key is written as tables on the command line."""
    key = "exp_manager.create_checkpoint_callback"
    disk = {"filesystems": {"fsx": {"write_gib_per_second": 1e-6}}}
    for engine, given in (
        ("nemo", {key: False}),
        ("neuronx-nemo", {"exp_manager": {"create_checkpoint_callback": False}}),
    ):
        job = job_of(engine=engine, engine_args=given, device=BIG, cluster=disk)
        plan = make_plan(job, rules=ENGINES[engine].rules)
        assert plan.storage is None and plan.duration is not None
        assert plan.duration.parts.saves == 0.0
        writes = make_plan(job.model_copy(update={"engine_args": {}}), rules=ENGINES[engine].rules)
        assert writes.storage is not None and writes.duration is not None
        assert writes.duration.parts.saves


def test_neuron_saves_by_the_clock() -> None:
    """Its scripts' train_time_interval of an hour, where the job says no steps."""
    rules = ENGINES["neuronx-nemo"].rules
    job = job_of(shape(hidden=4096), engine="neuronx-nemo", device=BIG, train_iters=10**12)
    plan = make_plan(job, rules=rules)
    assert plan.storage is not None and plan.duration is not None
    hours = plan.duration.parts.steps / 3600
    assert plan.storage.checkpoints == pytest.approx(hours, rel=0.01)
    assert plan.duration.parts.repeated < plan.duration.parts.steps / 100
    said = job.training.model_copy(update={"save_interval": 10**11})
    plan = make_plan(job.model_copy(update={"training": said}), rules=rules)
    assert plan.storage is not None and plan.storage.checkpoints == 10
