"""What builds an image, what makes an image file of it, and what is recorded of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record
from trainkit.jobs.containers import Container

RECORD_SUFFIX = ".json"  # of the record beside an image file: X.sqsh.json
BASE_ARGUMENT = "BASE_IMAGE"  # the build argument that `base` becomes

Argv = tuple[str, ...]
# Called with how much is done by what makes something: (done, of).
OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class BuildRecipe:
    """What a builder is asked for, the same for each of them.

    Args:
        dockerfile: its path.
        context: the folder that COPY and ADD read.
        tag: the name that the image gets.
        build_args: BASE_IMAGE among them.
        labels: what the image says of itself.
        source_date_epoch: seconds since 1970 that times in the image are set to; None: as it is.
        docker_format: it has what OCI's format cannot hold: SHELL, HEALTHCHECK.
        mark: what is noted beside working containers (leftovers.py); "": nothing.
    """

    dockerfile: Path
    context: Path
    tag: str
    build_args: Mapping[str, str]
    labels: Mapping[str, str]
    source_date_epoch: int | None = None
    docker_format: bool = False
    mark: str = ""


@dataclass(frozen=True)
class FailureHint:
    """What a line of a builder's (or importer's) means.

    Args:
        pattern: a regular expression, found anywhere, upper and lower case being the same.
        meaning: for people, in a few words.
        way_out: what helps.
        of_steps: it may be why a RUN fails, too; what else a step prints is its own matter.
    """

    pattern: str
    meaning: str
    way_out: str
    of_steps: bool = False


class Builder(Protocol):
    """A program that builds images of Dockerfiles: docker, podman or buildah. Its command lines
    are pure functions, so that --dry-run prints what is run."""

    name: str

    def is_here(self) -> bool:
        """Whether this machine has it; of docker also something that looks like its daemon."""

    def missing(self) -> str:
        """Where `is_here` is false: what is missing."""

    def version_argv(self) -> Argv:
        """Prints the version, and nothing else that has digits before it."""

    def build_argv(self, recipe: BuildRecipe, version: str) -> Argv:
        """Builds, and names the image at the end."""

    def digest_argv(self, image: str) -> Argv:
        """Prints the id of an image in its own store (sha256:HEX of the image's config, or HEX
        alone); fails where it is not there. Asks no registry."""

    def shell_argv(self, image: str) -> Argv:
        """Prints the SHELL of an image in its own store, "[]" where it has none; () where that
        does not change how it builds."""

    def pull_argv(self, image: str) -> Argv:
        """Fetches an image into its own store."""

    def push_argv(self, tag: str, target: str) -> tuple[Argv, ...]:
        """Puts the image into a registry, by the credentials in its own store."""

    def store_argv(self) -> Argv:
        """Prints "DRIVER FOLDER" of its own store; () where killed builds leave nothing there."""

    def remove_argv(self, container: str) -> Argv:
        """Removes a working container from its own store."""


@dataclass(frozen=True)
class ImageRecord(Record):
    """What an image is, as the stamp, the run's record and X.sqsh.json beside its file say it.

    Args:
        name: the [containers.X] table.
        tag: its name in the builder's store; of an import the source.
        digest: "sha256:HEX" of the image's config (what docker calls its id); "" where an import
            cannot know it.
        base: the image it was built on; "" where there is none.
        base_digest: the same of that one.
        builder: "docker", "podman", "buildah", or the importer's name.
        builder_version: as it says itself.
        dockerfile_sum: SHA-256 of the Dockerfile; "" for an import.
        commit: of the newest commit that changed what went in; "-dirty" after it where files
            differ from it; "" without git.
        size: in bytes: of the image file, or 0.
        made: when.
        options: how the image file was packed, {"compression": "zstd"}; none without one.
        fingerprint: of the image file (squashfs.py), by which it is known again; "" without one.
    """

    SCHEMA = "image/1"
    name: str
    tag: str
    digest: str
    base: str = ""
    base_digest: str = ""
    builder: str = ""
    builder_version: str = ""
    dockerfile_sum: str = ""
    commit: str = ""
    size: int = 0
    made: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""


def record_path(image_file: Path) -> Path:
    """Where the record of an image file lies: X.sqsh.json."""
    return image_file.with_name(image_file.name + RECORD_SUFFIX)


def write_record(path: Path, record: ImageRecord) -> None:
    """Write a record, whole or not at all."""
    write_json(path, record.to_json())


def read_record(path: Path) -> ImageRecord | None:
    """A record; None where there is none that can be read."""
    try:
        return ImageRecord.from_file(path)
    except ConfigError:
        return None


@dataclass(frozen=True)
class ImagePlan(Record):
    """What `build-container` makes for one container: an image of a Dockerfile, an image file of
    that or of `source`, or both.

    Args:
        container: its table.
        root: the cluster's.
        builder: the one that was chosen; "" where nothing is built and `source` needs none.
    """

    container: Container
    root: Path
    builder: str

    @property
    def tag(self) -> str:
        """The built image's name."""
        return self.container.built_tag

    @property
    def image_file(self) -> Path | None:
        """The .sqsh or .sif file that ranks start; None for docker and podman."""
        if self.container.runtime_traits.files:
            return Path(self.container.image)
        return None

    @property
    def build_record(self) -> Path:
        """What the unit `build` leaves, and the unit `import` reads: the record of the image in
        the builder's store."""
        return self.root / "images" / f"{self.container.name}.built.json"


class Importer(Protocol):
    """Makes an image file of an image: one a runtime and a kind of source.

    `commands` is what a person would type, for --dry-run and golden tests; `run` does just that,
    with the file under a temporary name until it is whole.
    """

    name: str
    hints: Sequence[FailureHint]

    def serves(self, plan: ImagePlan) -> bool:
        """Whether it is the one for this runtime, source and builder."""

    def commands(self, plan: ImagePlan, file: Path) -> tuple[Argv, ...]:
        """What makes `file`, in order."""

    def run(self, plan: ImagePlan, file: Path, on_step: OnStep) -> None:
        """Make `file`, whole and on the disk. What the programs say goes to stderr, which is the
        unit's log. Raises TrainkitError (exit 6) as they fail, with the meaning of their words."""
