"""container/Dockerfile.cpu is built, made a .sqsh file, entered, and trains."""

from __future__ import annotations

import json

import pytest

from tests.images.cpu import CpuProject

SHORT = {
    "train_iters": 5,
    "eval_iters": 1,
    "eval_interval": 5,
    "save_interval": 5,
    "lr_warmup_iters": 1,
    "micro_batch_size": 1,
    "global_batch_size": 2,
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_says_what_is_in_it(cpu_image: CpuProject) -> None:
    record = json.loads(cpu_image.image.with_name("cpu.sqsh.json").read_text())
    assert record["schema"] == "image/1" and record["digest"].startswith("sha256:")
    assert record["size"] == cpu_image.image.stat().st_size
    code = "import sys, trainkit; print(sys.prefix, trainkit.__file__)"
    said = cpu_image.lab.call(
        "env",
        "ENROOT_LOGIN_SHELL=no",
        "enroot",
        "start",
        str(cpu_image.image),
        "python3",
        "-c",
        code,
    )
    assert "/opt/venv" in said.splitlines()[-1], said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_trains_in_it(cpu_image: CpuProject) -> None:
    sets = [word for key, value in SHORT.items() for word in ("--set", f"training.{key}={value}")]
    said = cpu_image.invoke("train", "demo", *sets).stdout
    assert "stale" not in said.split("prep-data")[0], "train finds the image that is there"
    run = cpu_image.runs()[-1]
    losses = cpu_image.losses(run)
    assert sorted(losses)[-1] == 5
    record = json.loads(cpu_image.image.with_name("cpu.sqsh.json").read_text())
    assert record["digest"] in (run / "origin.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_second_build_is_fresh(cpu_image: CpuProject) -> None:
    before = cpu_image.image.stat().st_ino
    value = cpu_image.document("build-container", "demo")
    assert [stage["fresh"] for stage in value["stages"]] == [True]
    assert cpu_image.image.stat().st_ino == before
