"""podman and docker build the same Dockerfile as buildah, where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import oci
from tests.conftest import Project
from tests.images.cpu import copy_checkout
from tests.images.lab import TORCH, Lab

CONTAINER = """
[clusters.here]
node_folder = "{folder}/node"

[jobs.demo]
container = "cpu"

[containers.cpu]
runtime = "{builder}"
dockerfile = "container/Dockerfile.cpu"
base = "{base}"
build_args = {{ TORCH = "base" }}
tag = "localhost/trainkit-test/{builder}:1"
"""


@dataclass
class StoreProject(Project):
    """A project whose builder has a store of its own."""

    variables: dict[str, str]

    def environment(self, **more: str) -> dict[str, str]:
        """With the variables that name it."""
        return super().environment(**{**self.variables, **more})


def build(folder: Path, builder: str, variables: dict[str, str]) -> None:
    """Build twice: the second time all is fresh, and the image says what is in it."""
    copy_checkout(folder)
    text = CONTAINER.format(folder=folder, builder=builder, base=TORCH)
    (folder / "jobs.local.toml").write_text(text)
    project = StoreProject(folder, variables)
    words = ("build-container", "demo", "--builder", builder, "--json")
    made = json.loads(project.invoke(*words).stdout)
    assert made["image"]["builder"] == builder and made["image"]["digest"].startswith("sha256:")
    again = json.loads(project.invoke(*words).stdout)
    assert [stage["fresh"] for stage in again["stages"]] == [True]
    assert again["image"]["digest"] == made["image"]["digest"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_podman(tmp_path: Path, lab: Lab) -> None:
    if shutil.which("podman") is None:
        pytest.skip("needs podman")
    try:
        build(tmp_path, "podman", dict(lab.variables))
    finally:
        env = {**os.environ, **lab.variables}
        argv = ["podman", "rmi", "--force", "localhost/trainkit-test/podman:1"]
        subprocess.run(argv, env=env, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_docker(tmp_path: Path, lab: Lab) -> None:
    """The base goes from buildah's store into the daemon's."""
    with oci.docker(tmp_path / "docker") as docker:
        archive = tmp_path / "base.tar"
        lab.call("buildah", "push", "--quiet", TORCH, f"docker-archive:{archive}:{TORCH}")
        docker.call("load", "--quiet", "--input", str(archive))
        archive.unlink()
        build(tmp_path / "project", "docker", docker.variables)
