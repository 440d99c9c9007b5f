"""Fixtures of tests that build images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.images.cpu import CpuProject, built_cpu_image
from tests.images.lab import Lab, NoLab, make_lab
from trainkit.base.locks import locked


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    """One for all workers of a test run; skips, or fails, where this machine cannot have one."""
    folder = Path(os.environ["TRAINKIT_TEST_RUN"]) / "images"
    folder.mkdir(exist_ok=True)
    try:
        with locked(folder / "lock", {}):
            return make_lab(folder)
    except NoLab as why:
        if request.config.getoption("--require-cluster"):
            pytest.fail(f"--require-cluster: {why}")
        pytest.skip(f"no images here: {why}")


@pytest.fixture(scope="session")
def cpu_image(lab: Lab) -> CpuProject:
    """The image of container/Dockerfile.cpu."""
    return built_cpu_image(lab)
