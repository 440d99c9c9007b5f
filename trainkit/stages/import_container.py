"""The units `import` and `stripe` of the stage build-container: an image file of the image.

As a program: each of the two, as its spec says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.base.documents import utc_now
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import locked
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.sums import file_sum, identity_of
from trainkit.images.build import refuse_other_image
from trainkit.images.builders import BUILDERS
from trainkit.images.contract import (
    ImagePlan,
    ImageRecord,
    Importer,
    read_record,
    record_path,
    write_record,
)
from trainkit.images.importers import importer_of
from trainkit.images.importers.published import file_problem, other_image
from trainkit.images.squashfs import fingerprint
from trainkit.images.stripe import stripe_commands, stripe_file
from trainkit.jobs.containers import Container
from trainkit.stages.contract import Unit

ARGV = (sys.executable, "-I", "-m", "trainkit.stages.import_container")
IMPORT = "import"
STRIPE = "stripe"


def import_units(plan: ImagePlan) -> tuple[Unit, ...]:
    """What is to be done after the unit `build` (whose record is `plan.build_record`); nothing
    where ranks start an image of the builder's own store. Raises TrainkitError (exit 6) where
    nothing can make such a file."""
    file = plan.image_file
    if file is None:
        return ()
    importer = _importer(plan)
    spec = {"plan": plan.to_json()}
    after = ("build",) if plan.container.dockerfile else ()
    first = Unit(IMPORT, ARGV, {**spec, "unit": IMPORT}, (file,), after, network=True)
    units = [replace(first, commands=lambda: importer.commands(plan, file))]
    if stripe := plan.container.stripe:
        # the file keeps its size and its time, so that the import stays what it was
        last = Unit(STRIPE, ARGV, {**spec, "unit": STRIPE}, (record_path(file),), (IMPORT,))
        units.append(replace(last, commands=lambda: stripe_commands(file, stripe)))
    return tuple(units)


def stale_import(plan: ImagePlan) -> str:
    """Why the image file has to be made again, whatever the build says: "" where it is whole, of
    the image of its record, and packed and spread as asked."""
    file = plan.image_file
    if file is None:
        return ""
    if not file.exists():
        return f"{file} was never made"
    if problem := file_problem(file):
        return problem
    record = read_record(record_path(file))
    if record is None:
        return f"{record_path(file)} is not there, which says what {file} was made of"
    if problem := other_image(file, record):
        return problem
    return _other_wish(plan, record)


def _other_wish(plan: ImagePlan, record: ImageRecord) -> str:
    """In what the image file differs from what is asked for; "" in nothing."""
    container = plan.container
    if container.source and record.tag != container.source:
        return f"containers.{container.name}.source was {record.tag}"
    built = read_record(plan.build_record) if container.dockerfile else None
    if built and built.digest != record.digest:
        return f"{built.tag} was built again: {built.digest[:19]} instead of {record.digest[:19]}"
    before = dict(record.options)
    wanted = {**file_options(container), **stripe_options(container)}
    if not container.stripe:
        before.pop("stripe", None)  # spread wider than asked for is as good
    for key in sorted({*before, *wanted}):
        if before.get(key) != wanted.get(key):
            return (
                f"{key} of {plan.image_file} was {before.get(key, 'not set')} and is to be"
                f" {wanted.get(key, 'not set')}"
            )
    return ""


def file_options(container: Container) -> dict[str, str]:
    """How the file is packed, as its record has it."""
    if container.squashfs is None:
        return {}
    found: dict[str, str] = {"compression": container.squashfs.compression}
    if container.squashfs.level is not None:
        found["level"] = str(container.squashfs.level)
    return found


def stripe_options(container: Container) -> dict[str, str]:
    """How it is spread, as its record has it."""
    if container.stripe is None:
        return {}
    return {"stripe": f"{container.stripe.size} over {container.stripe.count}"}


def _importer(plan: ImagePlan) -> Importer:
    importer = importer_of(plan)
    if importer is None:
        raise TrainkitError(
            f"nothing makes {plan.image_file} of {plan.container.source or plan.tag} with builder"
            f" {plan.builder or 'none'!r} for runtime = '{plan.container.runtime}'",
            exit=Exit.STAGE_FAILED,
            hint="buildah takes docker://; dockerd:// and podman:// need enroot or apptainer",
        )
    return importer


def _record(plan: ImagePlan, importer: str) -> ImageRecord:
    """What is known of the image before its file is made."""
    if plan.container.source:
        tag = plan.container.source
        return ImageRecord(plan.container.name, tag, "", builder=importer)
    built = read_record(plan.build_record)
    if built is None:
        raise TrainkitError(
            f"{plan.build_record} cannot be read, which says what was built",
            exit=Exit.STAGE_FAILED,
            hint="run `invoke build-container` with --force",
        )
    return built


def _lacks_stripes_only(plan: ImagePlan, file: Path) -> bool:
    """Whether the import was done, and what came after it failed: it takes long, and need not be
    done again."""
    container = plan.container.model_copy(update={"stripe": None})
    record = read_record(record_path(file))
    return (
        plan.container.stripe is not None
        and record is not None
        and "stripe" not in record.options
        and not stale_import(replace(plan, container=container))
    )


def _import(plan: ImagePlan, file: Path, progress: ProgressCallback) -> dict[str, object]:
    if not _lacks_stripes_only(plan, file):
        _make_file(plan, file, progress)
    whole = read_record(record_path(file))
    assert whole is not None
    read = []
    if plan.container.dockerfile:
        path = plan.build_record
        read.append([*identity_of(path), file_sum(path)])
    return {"file": str(file), "size": whole.size, "digest": whole.digest, "read": read}


def _make_file(plan: ImagePlan, file: Path, progress: ProgressCallback) -> None:
    importer = _importer(plan)
    record = _record(plan, importer.name)
    built_by = BUILDERS.get(record.builder) if plan.container.dockerfile else None
    if built_by:
        refuse_other_image(built_by, record)
    importer.run(plan, file, progress)
    if built_by:  # the record that says so is not written: the file is made again
        refuse_other_image(built_by, record)
    whole = replace(
        record,
        size=file.stat().st_size,
        fingerprint=fingerprint(file),
        made=utc_now(),
        options=file_options(plan.container),
    )
    write_record(record_path(file), whole)


def _stripe(plan: ImagePlan, file: Path, progress: ProgressCallback) -> dict[str, object]:
    stripe = plan.container.stripe
    record = read_record(record_path(file))
    if stripe is None or record is None:
        raise TrainkitError(
            f"{record_path(file)} cannot be read, which says what {file} holds",
            exit=Exit.STAGE_FAILED,
            hint="run `invoke build-container` with --force",
        )
    progress(0, 1)
    stripe_file(file, stripe)
    options = {**file_options(plan.container), **stripe_options(plan.container)}
    write_record(record_path(file), replace(record, options=options))
    progress(1, 1)
    return {"file": str(file), "stripe": stripe.size, "count": stripe.count}


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Import or stripe. Returns {"file", ...}."""
    plan = ImagePlan.from_json(value["plan"])
    file = plan.image_file
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    # another root, or another table, may name the same file
    lock = file.with_name(f".{file.name}.lock")
    with locked(lock, {"file": str(file)}, remove=True):
        if value["unit"] == STRIPE:
            return _stripe(plan, file, progress)
        return _import(plan, file, progress)


if __name__ == "__main__":
    run_unit(work)
