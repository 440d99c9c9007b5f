"""The stage build-container: the image that a job's ranks run in is the one that jobs.toml
describes. As a program: the unit that builds it.

Fresh are: the Dockerfile, the ignore file and every file that COPY and ADD take, by name; build
arguments; the base image and the built one, as the builder's own store has them; the image file.
Registries are not asked: `docker pull BASE` (or the same of another builder) brings a newer base,
and that makes it stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.sums import file_sum
from trainkit.images.build import (
    BuildInput,
    arguments_of,
    build_commands,
    build_image,
    image_digests,
    read_input,
    short_digest,
)
from trainkit.images.builders import BUILDERS, first_here
from trainkit.images.contract import ImagePlan, ImageRecord, read_record, record_path, write_record
from trainkit.jobs.schema import Job
from trainkit.stages.contract import Need, Unit
from trainkit.stages.import_container import import_units, stale_import
from trainkit.stages.stamps import file_identity, judge_stamp, read_stamp, unit_stamp_path

VERSION = 1
NAME = "build-container"


@dataclass(frozen=True)
class BuildContainerStage:
    """The image of a job's container, where jobs.toml says what it is made of: one need.

    Args:
        builder: the one that --builder names; None: that of jobs.toml, or the first here.
    """

    name = NAME
    builder: str | None = None

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        plan = image_plan(job, self.builder)
        if plan is None:
            return []
        container = plan.container
        units: tuple[Unit, ...] = ()
        inputs: tuple[Path, ...] = ()
        settings: dict[str, object] = {"tag": plan.tag}
        outputs: list[Path] = []
        bases: tuple[str, ...] = ()
        if container.dockerfile is not None:
            given = read_input(container, plan.builder)
            inputs = given.files
            bases = given.parsed.bases
            settings |= _settings(plan, given)
            units = (_build_unit(plan),)
            outputs.append(plan.build_record)
        if container.source is not None:
            settings = {"source": container.source}
        if plan.image_file is not None:
            settings |= _packing(plan)
        units += import_units(plan)
        need = Need(
            NAME,
            container.name,
            container.name,
            VERSION,
            settings,
            inputs,
            (*outputs, *(path for unit in units[len(outputs) :] for path in unit.outputs)),
            units,
        )
        return [replace(need, evidence=_evidence(need, plan, bases, stamps))]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()


def image_plan(job: Job, builder: str | None = None) -> ImagePlan | None:
    """What is made for a job's container; None where nothing is.

    Args:
        job: the job.
        builder: the one that --builder names.
    """
    container = job.container
    if container is None or not container.is_made:
        return None
    named = builder or container.builder
    # enroot and apptainer fetch a source themselves
    chosen = named or ("" if container.dockerfile is None else first_here(container))
    return ImagePlan(container, job.cluster.root_folder.absolute(), chosen)


def made_image(job: Job) -> ImageRecord | None:
    """The record of the image that was made for a job's container, for its runs: of its file, where
    ranks start one; None where none was made here."""
    plan = image_plan(job)
    if plan is None:
        return None
    if plan.image_file is not None:
        return read_record(record_path(plan.image_file))
    return read_record(plan.build_record)


def image_of(job: Job) -> str:
    """Which image units of a job are in: its digest where it was made here, else its name; "":
    they run outside."""
    if job.container is None or not job.container.stages_in_container:
        return ""
    made = made_image(job)
    return (made.digest if made else "") or job.container.image


def _settings(plan: ImagePlan, given: BuildInput) -> dict[str, object]:
    """What the image hangs on besides the content of files."""
    arguments = {f"build argument {key}": v for key, v in arguments_of(plan.container).items()}
    modes = {f"mode of {name}": mode for name, mode in given.taken.modes.items()}
    links = {f"link {name}": target for name, target in given.taken.links.items()}
    return {**arguments, **modes, **links}


def _packing(plan: ImagePlan) -> dict[str, object]:
    container = plan.container
    squashfs = container.squashfs.model_dump(mode="json") if container.squashfs else None
    stripe = container.stripe.model_dump(mode="json") if container.stripe else None
    return {"image": container.image, "squashfs": squashfs, "stripe": stripe}


def _build_unit(plan: ImagePlan) -> Unit:
    return Unit(
        "build",
        (sys.executable, "-I", "-m", "trainkit.stages.build_container"),
        plan.to_json(),
        (plan.build_record,),
        network=True,
        commands=lambda: build_commands(plan),
    )


def _evidence(
    need: Need, plan: ImagePlan, bases: tuple[str, ...], stamps: Path
) -> Callable[[], tuple[bool, str]]:
    """How the need is judged: its stamp first, which costs nothing, then the image file, then the
    builder's store."""

    def judge() -> tuple[bool, str]:
        fresh, because = judge_stamp(need, stamps)
        if not fresh and because.startswith("output"):
            # what is wrong with the file says more than that it changed
            return False, stale_import(plan) or because
        if not fresh:
            return False, because
        stale = stale_import(plan)
        if not stale and plan.container.dockerfile is not None:
            stale = _stale_store(plan, bases, stamps)
        return not stale, stale or because

    return judge


def _stale_store(plan: ImagePlan, bases: tuple[str, ...], stamps: Path) -> str:
    """What of the builder's store is not as the build left it: "" where all is, or where what was
    built is in an image file and the builder is not here any more."""
    stamp = read_stamp(unit_stamp_path(stamps, plan.container.name, "build")) or {}
    record = read_record(plan.build_record)
    if record is None or "bases" not in stamp.get("result", {}):
        return "its record cannot be read"
    builder = BUILDERS.get(record.builder)
    if builder is None or not builder.is_here():
        if plan.image_file is not None:
            return ""
        return f"{record.builder}, whose store it is in, is not here any more"
    in_store = f"in {record.builder}'s store"
    now, *now_bases = image_digests(builder, [record.tag, *bases])
    if now is None and plan.image_file is None:
        return f"{record.tag} is not {in_store} any more"
    if now not in (None, record.digest):
        return (
            f"{record.tag} {in_store} is {short_digest(now)} now, and {short_digest(record.digest)}"
            " was built"
        )
    before = stamp["result"]["bases"]
    for image, digest in zip(bases, now_bases, strict=True):
        if digest not in (None, before.get(image)):
            return (
                f"base {image} changed from {short_digest(before.get(image))} to"
                f" {short_digest(digest)}"
            )
    return ""


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Build the image; its record is written when it is whole. What it reads is noted before the
    builder begins: a file that changes meanwhile makes the image stale."""
    plan = ImagePlan.from_json(value)
    given = read_input(plan.container, plan.builder)
    read = []
    for path in given.files:
        identity = file_identity(path)
        if identity is not None:
            read.append([*identity, file_sum(path)])
    built = build_image(plan, progress)
    write_record(plan.build_record, built.record)
    return {"read": read, "image": built.record.to_json(), "bases": dict(built.bases)}


if __name__ == "__main__":
    run_unit(work)
