"""Building the image of one container: what goes in, the commands, and the record of what came
out.

The image is labelled with commit, base and version, and its files get a time: both are of the
newest commit that changed what goes into the image, so it stays the same as long as its context.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import trainkit
from trainkit.base.documents import utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import sha256_file
from trainkit.base.git import git_answer, git_environment, holds_password, without_passwords
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.images.builders import choose_builder
from trainkit.images.builders.options import EPOCH_ARGUMENT, version_numbers
from trainkit.images.context import ContextFiles, context_files, ignore_file, read_ignore
from trainkit.images.contract import (
    BASE_ARGUMENT,
    Argv,
    Builder,
    BuildRecipe,
    ImagePlan,
    ImageRecord,
    OnStep,
)
from trainkit.images.dockerfile import PREDEFINED, Dockerfile, read_dockerfile
from trainkit.images.leftovers import own_mark, remove_leftovers_of
from trainkit.images.programs import ask, ask_all, print_line, run_program, step_reader
from trainkit.jobs.containers import Container
from trainkit.jobs.image_reference import objection_to

REVISION = "org.opencontainers.image.revision"
# 1980-01-01: zip archives, and so wheels, know nothing older
WITHOUT_GIT = 315532800
DIRTY = "-dirty"
SECONDS = 60.0


@dataclass(frozen=True)
class ContentCommit:
    """The newest commit that changed one of the files.

    Args:
        commit: its hash, "-dirty" after it where a file differs from the newest commit, or is
            not known to git; "" without git.
        time: of the commit, in seconds since 1970.
    """

    commit: str
    time: int


def content_commit(context: Path, files: Sequence[Path]) -> ContentCommit:
    """The newest commit that changed one of `files`, which are below `context` or its
    repository."""
    top = git_answer(context, "rev-parse", "--show-toplevel")
    if top is None:
        return ContentCommit("", WITHOUT_GIT)
    root = Path(top.rstrip("\n"))
    names = {os.path.relpath(os.path.realpath(path), root) for path in files}
    newest = _newest(root, names)
    if newest is None:
        return ContentCommit("", WITHOUT_GIT)
    if _is_dirty(root, names):
        return ContentCommit(newest.commit + DIRTY, newest.time)
    return newest


def source_date_epoch(content: ContentCommit) -> int:
    """What times in the image are set to: SOURCE_DATE_EPOCH of the caller, or the commit's."""
    given = os.environ.get(EPOCH_ARGUMENT, "")
    return int(given) if given.isdecimal() else content.time


def labels_of(content: ContentCommit, base: str) -> dict[str, str]:
    """Labels by the names of the OCI image specification, annotations.md. Licence and version are
    the Dockerfile's to say: whose they are is not known here."""
    labels = {}
    if content.commit:
        labels[REVISION] = content.commit
    if base:
        labels["org.opencontainers.image.base.name"] = base
    return labels


def arguments_that_say(content: ContentCommit) -> dict[str, str]:
    """Build arguments for Dockerfiles that declare them, as those of `container/` do: what the
    image says when it starts."""
    return {
        "IMAGE_REVISION": content.commit or "unknown",
        "IMAGE_VERSION": trainkit.__version__,
    }


def _newest(root: Path, names: set[str]) -> ContentCommit | None:
    """The log is read only as far as the commit that is looked for."""
    words = ("log", "--format=%x01%H %ct", "--name-only", "-z", "-m", "--first-parent")
    newest: ContentCommit | None = None
    with subprocess.Popen(
        ["git", "-c", "core.quotePath=false", "-C", str(root), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=git_environment(os.environ),
    ) as log:
        assert log.stdout is not None
        rest = b""
        while newest is None and (block := log.stdout.read(2**16)):
            *commits, rest = (rest + block).split(b"\x01")
            newest = next(filter(None, (_changes(each, names) for each in commits)), None)
        newest = newest or _changes(rest, names)
        log.kill()
    return newest


def _changes(text: bytes, names: set[str]) -> ContentCommit | None:
    """The commit, where it changes one of the names."""
    head, *changed = text.decode("utf-8", "surrogateescape").replace("\n", "\0").split("\0")
    if not names.intersection(changed):
        return None
    commit, time = head.split()
    return ContentCommit(commit, int(time))


def _is_dirty(root: Path, names: set[str]) -> bool:
    changed = git_answer(root, "diff", "--name-only", "-z", "HEAD", "--")
    known = git_answer(root, "ls-files", "-z")
    if changed is None or known is None:
        return True
    return bool(names.intersection(changed.split("\0"))) or not names <= set(known.split("\0"))


SHA256 = "sha256:"


@dataclass(frozen=True)
class BuildInput:
    """All that a build reads.

    Args:
        dockerfile: its path.
        ignore: the ignore file that counts; None: there is none.
        parsed: what the Dockerfile says.
        taken: the files of the context.
    """

    dockerfile: Path
    ignore: Path | None
    parsed: Dockerfile
    taken: ContextFiles

    @property
    def files(self) -> tuple[Path, ...]:
        """What is judged by size and time: the Dockerfile first."""
        first = (self.dockerfile, self.ignore) if self.ignore else (self.dockerfile,)
        rest = (path for path in self.taken.files if path not in first)
        return (*first, *rest)


def arguments_of(container: Container) -> dict[str, str]:
    """Build arguments, BASE_IMAGE first."""
    base = {BASE_ARGUMENT: container.base} if container.base else {}
    return {**base, **container.build_args}


def read_input(container: Container, builder: str) -> BuildInput:
    """What a build of this container reads. Raises ConfigError (exit 6) where something of it is
    not there, or an argument is given that nothing reads."""
    assert container.dockerfile is not None
    dockerfile = Path(container.dockerfile)
    context = Path(container.context or dockerfile.parent)
    arguments = arguments_of(container)
    _refuse_passwords(container, arguments)
    parsed = read_dockerfile(dockerfile, arguments)
    if not context.is_dir():
        raise ConfigError(
            f"containers.{container.name}.context = '{context}' is not a folder",
            exit=Exit.STAGE_FAILED,
            hint="it is relative to the folder of jobs.toml, which it also is by default",
        )
    _refuse_unread(container, parsed, dockerfile)
    for image in parsed.bases:
        if said := objection_to(image):
            raise ConfigError(f"{dockerfile}: FROM {image}: {said}", exit=Exit.STAGE_FAILED)
    ignore = ignore_file(dockerfile, context, builder)
    taken = context_files(context, read_ignore(ignore), parsed.copied, dockerfile)
    return BuildInput(dockerfile, ignore, parsed, taken)


def _refuse_passwords(container: Container, arguments: Mapping[str, str]) -> None:
    """Build arguments stay in the image's history, in logs and in records."""
    for name, value in arguments.items():
        if holds_password(value):
            raise ConfigError(
                f"containers.{container.name}: build argument {name} ="
                f" '{without_passwords(value)}' holds a user or password, which would stay in the"
                " image",
                exit=Exit.STAGE_FAILED,
                hint="let the step read it from a file that is mounted for the build alone",
            )


def _refuse_unread(container: Container, parsed: Dockerfile, dockerfile: Path) -> None:
    """Some builders warn of an argument that no ARG declares, others say nothing."""
    for name in arguments_of(container):
        if name not in parsed.arguments and name not in PREDEFINED:
            key = "base" if name == BASE_ARGUMENT else f"build_args.{name}"
            raise ConfigError(
                f"containers.{container.name}.{key} changes nothing:"
                f" {dockerfile} has no ARG {name}",
                exit=Exit.STAGE_FAILED,
                hint=f"add ARG {name} to the Dockerfile (a base's before FROM), or remove the key",
            )


def recipe_of(container: Container, given: BuildInput, builder: Builder) -> BuildRecipe:
    """What the builder is asked for, once the bases are in its store."""
    context = Path(container.context or given.dockerfile.parent)
    links = tuple(context / name for name in given.taken.links)
    content = content_commit(context, (*given.files, *links))
    said = arguments_that_say(content)
    declared = {name: said[name] for name in said if name in given.parsed.arguments}
    return BuildRecipe(
        given.dockerfile,
        context,
        container.built_tag,
        {**declared, **arguments_of(container)},
        labels_of(content, container.base or ""),
        source_date_epoch(content),
        given.parsed.docker_format or _has_shell(builder, given.parsed.bases),
    )


def _has_shell(builder: Builder, bases: Sequence[str]) -> bool:
    """Whether steps of the image run in a SHELL that a base brings."""
    answers = ask_all([argv for image in bases if (argv := builder.shell_argv(image))])
    return any(said not in (None, "", "[]") for said in answers)


def build_commands(plan: ImagePlan) -> tuple[Argv, ...]:
    """What would be run, for --dry-run: a base is fetched where it is not there yet."""
    builder, _ = choose_builder(plan.builder or None, plan.container)
    given = read_input(plan.container, builder.name)
    recipe = recipe_of(plan.container, given, builder)
    pulls = tuple(builder.pull_argv(image) for image in _absent(builder, given.parsed.bases))
    return (*pulls, builder.build_argv(recipe, ask(builder.version_argv()) or ""))


def _absent(builder: Builder, images: Sequence[str]) -> list[str]:
    ids = image_digests(builder, images)
    return [image for image, digest in zip(images, ids, strict=True) if digest is None]


def image_digests(builder: Builder, images: Sequence[str]) -> list[str | None]:
    """The ids ("sha256:HEX") of images in the builder's own store; None of one that is not there,
    or where the builder cannot be asked."""
    answers = ask_all([builder.digest_argv(image) for image in images])
    return [None if not said else SHA256 + said.removeprefix(SHA256) for said in answers]


def refuse_other_image(builder: Builder, record: ImageRecord) -> None:
    """Raises TrainkitError (exit 6) where the tag of a built image is another image in a builder's
    store, or none: a tag is a name that everybody who builds there can give again."""
    (now,) = image_digests(builder, [record.tag])
    if now == record.digest:
        return
    there = f"is {short_digest(now)}" if now else "is not"
    raise TrainkitError(
        f"{record.tag} {there} in {builder.name}'s store now, and {record.builder} built"
        f" {short_digest(record.digest)}",
        exit=Exit.STAGE_FAILED,
        hint=(
            "run it again with --force; if others build with that tag, give one of your own:"
            f" containers.{record.name}.tag"
        ),
    )


def short_digest(digest: str | None) -> str:
    """A digest for people."""
    return (digest or "an unknown one").removeprefix(SHA256)[:12]


@dataclass(frozen=True)
class BuiltImage:
    """What a build left in the builder's store.

    Args:
        record: of the image.
        bases: digest of each image it was built on, by name; "" of one that is not in the store.
    """

    record: ImageRecord
    bases: Mapping[str, str]


def build_image(plan: ImagePlan, on_step: OnStep) -> BuiltImage:
    """Build the image, its bases fetched first where they are not there. What the builder says
    goes to stderr.

    Raises TrainkitError (exit 6) where there is no builder, or it fails; ConfigError (exit 6) as
    `read_input`.
    """
    builder, chosen = choose_builder(plan.builder or None, plan.container)
    container = plan.container
    given = read_input(container, builder.name)
    dockerfile_sum = sha256_file(given.dockerfile)
    version = _version(builder)
    print_line(f"builder: {chosen}, version {version}")
    remove_leftovers_of(builder)
    for image in _absent(builder, given.parsed.bases):
        run_program(builder.pull_argv(image))
    recipe = recipe_of(container, given, builder)
    if builder.store_argv():
        recipe = replace(recipe, mark=own_mark())
    argv = builder.build_argv(recipe, version)
    try:
        run_program(argv, on_line=step_reader(on_step))
    except TrainkitError:
        remove_leftovers_of(builder)
        raise
    found = image_digests(builder, given.parsed.bases)
    bases = {name: each or "" for name, each in zip(given.parsed.bases, found, strict=True)}
    (digest,) = image_digests(builder, [recipe.tag])
    if digest is None:
        raise TrainkitError(
            f"{builder.name} built {recipe.tag} and has no image of that name now",
            exit=Exit.STAGE_FAILED,
            hint="somebody removed it meanwhile: run it again",
        )
    base = container.base or next(iter(bases), "")
    record = ImageRecord(
        name=container.name,
        tag=recipe.tag,
        digest=digest,
        base=base,
        base_digest=bases.get(base, ""),
        builder=builder.name,
        builder_version=version,
        dockerfile_sum=SHA256 + dockerfile_sum,
        commit=recipe.labels.get(REVISION, ""),
        made=utc_now(),
    )
    return BuiltImage(record, bases)


def _version(builder: Builder) -> str:
    """The builder's version. Where it does not answer its own words say why."""
    said: list[str] = []
    run_program(builder.version_argv(), on_line=said.append)
    numbers = version_numbers("\n".join(said))
    return ".".join(map(str, numbers))


def push_commands(plan: ImagePlan, builder: Builder) -> tuple[Argv, ...]:
    """What --push runs. Raises ConfigError (exit 3) where jobs.toml names no registry."""
    container = plan.container
    if container.registry is None:
        raise ConfigError(
            f"--push: containers.{container.name} names no registry",
            hint='add registry = "HOST/PATH"; the tag goes below it',
        )
    return builder.push_argv(plan.tag, f"{container.registry.rstrip('/')}/{plan.tag}")
