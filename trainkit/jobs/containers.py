"""The image that ranks run in, and what starts it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.image_reference import objection_to
from trainkit.jobs.table import NAME, VARIABLE, Environment, Strings, Table, needs, wrong

MOUNTABLE = r"/[^\s,:'\"]*"  # a path as every runtime takes it unquoted
MOUNT = rf"^{MOUNTABLE}:{MOUNTABLE}(:ro)?$"


@dataclass(frozen=True)
class RuntimeTraits:
    """What a job has to know of the runtime that starts its image. How it does that is a value in
    trainkit/launch/containers.

    Args:
        image: a regular expression of the images that it takes.
        takes: the same in words.
        files: how an image file ends that `build-container` makes for it; without any it starts
            images of a store.
        stores: builders whose own store it starts images of; without any: those of all, by a file.
        registry_end: the sign between a registry's name and the image's.
        by_srun: it is a part of srun, whose tasks are in the image from their start.
    """

    image: str
    takes: str
    files: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    registry_end: str = "/"
    by_srun: bool = False


OCI_IMAGE = r"(?!.*://)[a-z0-9][\w./:@-]*(?<!\.sqsh)(?<!\.sif)"
OCI_WORDS = "a name, [REGISTRY/]IMAGE[:TAG]"
RUNTIME_TRAITS: Mapping[str, RuntimeTraits] = {
    "pyxis": RuntimeTraits(
        r"/\S+\.(sqsh|squashfs)|([a-z]+://)?([^\s/#@]+@)?([^\s/#]+#)?[^\s#:./]+(/[^\s#:]+)*(:[\w.-]+)?",
        "a path to a .sqsh or .squashfs file, or [REGISTRY#]IMAGE[:TAG]",
        files=(".sqsh", ".squashfs"),
        registry_end="#",
        by_srun=True,
    ),
    "enroot": RuntimeTraits(
        r"/\S+\.(sqsh|squashfs)",
        "a path to a .sqsh or .squashfs file, which `enroot import` makes",
        files=(".sqsh", ".squashfs"),
    ),
    "apptainer": RuntimeTraits(
        r"/\S+(\.sif|/)|[a-z]+://\S+",
        "a path to a .sif file, a sandbox folder with / at its end, or a URI such as docker://NAME",
        files=(".sif",),
    ),
    "docker": RuntimeTraits(OCI_IMAGE, OCI_WORDS, stores=("docker",)),
    "podman": RuntimeTraits(OCI_IMAGE, OCI_WORDS, stores=("podman", "buildah")),
}
SOURCES = ("docker", "dockerd", "podman")  # schemes of `source`: those of enroot-import


class Squashfs(Table):
    """How mksquashfs packs an image file."""

    compression: Literal["gzip", "lzo", "lz4", "xz", "zstd"] = Field(
        "zstd", description="mksquashfs -comp"
    )
    level: int | None = Field(
        None,
        ge=1,
        le=22,
        description="mksquashfs -Xcompression-level; by default the compressor's own",
    )

    @model_validator(mode="after")
    def _has_such_a_level(self) -> Squashfs:
        most = {"gzip": 9, "lzo": 9, "zstd": 22}.get(self.compression, 0)
        if self.level is not None and self.level > most:
            limit = f"levels 1 to {most}" if most else "no levels"
            raise wrong("level", f"level = {self.level}: {self.compression} has {limit}")
        return self


class Stripe(Table):
    """How an image file lies on a Lustre file system: `lfs setstripe` of its folder."""

    size: str = Field("1M", pattern=r"^[1-9][0-9]*[kKmMgG]$", description="lfs setstripe -S")
    count: int = Field(
        -1, ge=-1, description="lfs setstripe -c: targets it is spread over; -1: all of them"
    )


class Container(Table):
    """An image that the agent of each node, and so its ranks, run in."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    image: str = Field(
        "",
        description=(
            "an image of a registry, or a file (.sqsh, .sif), as the runtime names it; by default"
            " what `build-container` makes: the tag, or ROOT/images/NAME.sqsh or .sif"
        ),
    )
    dockerfile: str | None = Field(
        None,
        min_length=1,
        description="what `build-container` builds, relative to the folder of jobs.toml",
    )
    context: str | None = Field(
        None,
        min_length=1,
        description="the folder that COPY and ADD read; by default the one of jobs.toml",
    )
    base: str | None = Field(
        None, description="the image it is built on: build argument BASE_IMAGE of the Dockerfile"
    )
    build_args: dict[Annotated[str, Field(pattern=VARIABLE + "$")], str] = Field(
        default_factory=dict,
        description="more build arguments; they stay in the image, so secrets do not belong here",
    )
    source: str | None = Field(
        None,
        description=(
            "an image that is imported as it is, without a build: docker://[USER@][REGISTRY#]IMAGE,"
            " dockerd://IMAGE or podman://IMAGE, as enroot-import names them"
        ),
    )
    tag: str | None = Field(
        None, description="the name that the built image gets; by default trainkit-NAME"
    )
    builder: Literal["docker", "podman", "buildah"] | None = Field(
        None, description="what builds it; by default the first of them that is there"
    )
    registry: str | None = Field(
        None, description="where `build-container --push` puts the tag: HOST[:PORT][/PATH]"
    )
    squashfs: Squashfs | None = Field(
        None, description="how the .sqsh file is packed; by default as enroot does"
    )
    stripe: Stripe | None = Field(
        None, description="spread the image file over the targets of a Lustre file system"
    )
    stage_to: str | None = Field(
        None,
        pattern=f"^{MOUNTABLE}$",
        description="a folder of every node that the image file is copied to before it is used",
    )
    stages_in_container: bool = Field(
        False, description="stages that compute run in the image too, not only ranks"
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
    def _is_made_of_one_thing(self) -> Container:
        if not (self.image or self.dockerfile or self.source):
            raise needs(
                "image", "an image is missing: image, or what it is made of: dockerfile, source"
            )
        if self.dockerfile and self.source:
            raise wrong("source", "source and dockerfile exclude each other: give one of them")
        for key in ("context", "base", "build_args", "tag", "registry"):
            if getattr(self, key) and not self.dockerfile:
                raise wrong(key, f"{key} is of a build, and there is no dockerfile")
        for key in ("squashfs", "stripe", "builder"):
            if getattr(self, key) and not self.is_made:
                raise wrong(key, f"{key} is of an image made here: give dockerfile or source")
        return self

    @model_validator(mode="after")
    def _fits_the_runtime(self) -> Container:
        files = self.runtime_traits.files
        if self.squashfs and ".sqsh" not in files:
            raise wrong("squashfs", f"runtime = '{self.runtime}' starts no .sqsh file")
        for key in ("source", "stripe", "stage_to"):
            if getattr(self, key) and not files:
                others = [name for name, traits in RUNTIME_TRAITS.items() if traits.files]
                raise wrong(
                    key,
                    f"{key} is of image files, and runtime = '{self.runtime}' has none: those of"
                    f" {', '.join(others)} do",
                )
        if self.is_made and files and self.image and not self.image.endswith(files):
            raise wrong(
                "image",
                f"image = '{self.image}': what is made for runtime = '{self.runtime}' is a file,"
                f" {' or '.join(f'*{ending}' for ending in files)}",
            )
        return self

    @model_validator(mode="after")
    def _names_are_references(self) -> Container:
        for key in ("tag", "base", "registry"):
            value = getattr(self, key)
            if value is not None and (said := objection_to(value)):
                raise wrong(key, f"{key} = {said}")
        if self.tag is not None and "@" in self.tag:
            raise wrong("tag", f"tag = '{self.tag}': a digest is not chosen, it comes of the build")
        scheme, colon, rest = (self.source or "").partition("://")
        if self.source is not None and not (colon and rest and scheme in SOURCES):
            raise wrong(
                "source",
                f"source = '{self.source}': it begins with"
                f" {', '.join(f'{name}://' for name in SOURCES)}",
            )
        return self

    @property
    def runtime_traits(self) -> RuntimeTraits:
        """What is special about the runtime."""
        return RUNTIME_TRAITS[self.runtime]

    @property
    def is_made(self) -> bool:
        """Whether the stage `build-container` makes the image."""
        return self.dockerfile is not None or self.source is not None

    @property
    def built_tag(self) -> str:
        """The name that the built image gets."""
        return self.tag if self.tag is not None else f"trainkit-{self.name}"

    @model_validator(mode="after")
    def _names_an_image(self) -> Container:
        traits = self.runtime_traits
        if self.image and not re.fullmatch(traits.image, self.image):
            message = f"image = '{self.image}': runtime = '{self.runtime}' takes {traits.takes}"
            end = traits.registry_end
            if end != "/" and re.match(rf"[^/{end}]*[.:][^/{end}]*/", self.image):
                meant = self.image.replace("/", end, 1)
                message += f"; a registry ends with '{end}' there: {meant}"
            raise wrong("image", message)
        return self
