"""The image that ranks run in, and what starts it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainkit.jobs.table import NAME, Environment, Strings, Table, wrong

MOUNTABLE = r"/[^\s,:'\"]*"  # a path as every runtime takes it unquoted
MOUNT = rf"^{MOUNTABLE}:{MOUNTABLE}(:ro)?$"
IMAGES: dict[str, tuple[str, str]] = {  # what each runtime takes for an image, and how that is said
    "pyxis": (
        r"/\S+\.(sqsh|squashfs)|([a-z]+://)?([^\s/#@]+@)?([^\s/#]+#)?[^\s#:./]+(/[^\s#:]+)*(:[\w.-]+)?",
        "a path to a .sqsh or .squashfs file, or [REGISTRY#]IMAGE[:TAG]",
    ),
    "enroot": (
        r"/\S+\.(sqsh|squashfs)",
        "a path to a .sqsh or .squashfs file, which `enroot import` makes",
    ),
    "apptainer": (
        r"/\S+(\.sif|/)|[a-z]+://\S+",
        "a path to a .sif file, a sandbox folder with / at its end, or a URI such as docker://NAME",
    ),
    "docker": (
        r"(?!.*://)[a-z0-9][\w./:@-]*(?<!\.sqsh)(?<!\.sif)",
        "a name, [REGISTRY/]IMAGE[:TAG]",
    ),
}
IMAGES["podman"] = IMAGES["docker"]


class Container(Table):
    """An image that the agent of each node, and so its ranks, run in."""

    planned = ("dockerfile",)

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    image: str = Field(
        min_length=1,
        description="an image of a registry, or a file (.sqsh, .sif), as the runtime names it",
    )
    runtime: Literal["pyxis", "enroot", "apptainer", "docker", "podman"] = Field(
        "pyxis", description="what starts it"
    )
    mounts: Annotated[tuple[Annotated[str, Field(pattern=MOUNT)], ...], Field(strict=False)] = (
        Field(
            (),
            description=(
                "HOST:CONTAINER[:ro], beside the cluster's root and what the job reads, which are"
                " always there under their own names"
            ),
        )
    )
    env: Environment = Field(
        default_factory=dict,
        description=(
            "environment variables of every rank, over the cluster's and the image's, below the"
            " job's"
        ),
    )
    python: str = Field(
        "python3",
        pattern=r"^[\w./+-]+$",
        description=(
            "the Python interpreter in the image: a path, or a name that is looked for after the"
            " prolog; 3.8 or newer, and 3.11 or newer for engine 'native'"
        ),
    )
    prolog: Strings = Field(
        (), description="shell lines that are run in the image before anything else"
    )
    args: Strings = Field(
        (),
        description=(
            "more words for the runtime, each by itself: of srun for pyxis, else before the image"
        ),
    )
    writable: bool = Field(
        False,
        description=(
            "pyxis, enroot, apptainer: the image's own file system may be written to; that is lost"
            " at the end"
        ),
    )

    @model_validator(mode="after")
    def _names_an_image(self) -> Container:
        form, words = IMAGES[self.runtime]
        if not re.fullmatch(form, self.image):
            message = f"image = '{self.image}': runtime = '{self.runtime}' takes {words}"
            if self.runtime == "pyxis" and re.match(r"[^/#]*[.:][^/#]*/", self.image):
                message += f"; a registry ends with '#' there: {self.image.replace('/', '#', 1)}"
            raise wrong("image", message)
        return self
