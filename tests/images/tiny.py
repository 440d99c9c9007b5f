"""Projects whose container is built in a second: a base of folders, and this machine's /usr while
a step of the build runs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import Project
from tests.images.lab import TINY, Lab
from tests.programs import put_program

DOCKERFILE = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY files /srv/files
RUN sh /srv/files/step.sh
ENV MADE=here
"""
LZ4 = '{ compression = "lz4" }'


@dataclass
class ImageProject(Project):
    """A project with the job `random` in containers.box, which `build-container` makes."""

    lab: Lab

    def environment(self, **more: str) -> dict[str, str]:
        """With the lab's store."""
        return super().environment(**{**self.lab.tiny, **more})

    @property
    def image(self) -> Path:
        """What is made."""
        return self.path / "images" / "box.sqsh"

    def step(self, text: str) -> None:
        """What the build runs."""
        (self.path / "files" / "step.sh").write_text(f"{text}\n")

    def build(self, *words: str, exit: int = 0) -> subprocess.CompletedProcess[str]:
        """invoke build-container."""
        return self.invoke("build-container", "random", *words, exit=exit)

    def record(self) -> dict[str, Any]:
        """What lies beside the image file."""
        value = json.loads(self.image.with_name("box.sqsh.json").read_text())
        assert isinstance(value, dict)
        return value

    def calls(self) -> list[str]:
        """What was asked of buildah and mksquashfs since the last time, without questions."""
        path = self.path / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith(QUESTIONS)]


QUESTIONS = ("buildah --version", "buildah inspect", "buildah umount", "buildah rm")
RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >> {calls}
PATH=${{PATH#*:}} exec "$(basename "$0")" "$@"
"""


def make_image_project(project: Project, lab: Lab, tag: str, **more: str) -> ImageProject:
    """The project with its container; programs that build are noted.

    Args:
        project: to be changed.
        lab: whose store it uses.
        tag: of the image, this test's alone.
        more: keys of [containers.box], as TOML.
    """
    folder = project.path
    (folder / "files").mkdir()
    (folder / "files" / "a.txt").write_text("a\n")
    (folder / "Dockerfile").write_text(DOCKERFILE.lstrip())
    values = {"runtime": '"enroot"', "dockerfile": '"Dockerfile"', "base": f'"{TINY}"'}
    values |= {"builder": '"buildah"', "tag": f'"{tag}"', "squashfs": LZ4, **more}
    lines = "".join(f"{key} = {value}\n" for key, value in values.items())
    text = (folder / "jobs.toml").read_text()
    text = text.replace("[jobs.random]", '[jobs.random]\ncontainer = "box"')
    (folder / "jobs.toml").write_text(f"{text}\n[containers.box]\n{lines}")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("buildah", "mksquashfs"):
        put_program(programs, name, RECORDER.format(calls=folder / "calls"))
    tiny = {**lab.tiny, "PATH": f"{programs}:{lab.tiny['PATH']}"}
    made = ImageProject(folder, Lab(lab.folder, lab.variables, tiny))
    made.step("echo made > /srv/made")
    return made
