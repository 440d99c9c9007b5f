"""The units `import` and `stripe` of the stage build-container: an image file of the image.

As a program: the unit that makes the file."""

from __future__ import annotations

from trainkit.images.contract import Argv, ImagePlan
from trainkit.stages.contract import Unit


def import_units(plan: ImagePlan) -> tuple[Unit, ...]:
    """What is to be done after the unit `build` (whose record is `plan.build_record`); nothing
    where ranks start an image of the builder's own store."""
    return ()


def import_commands(plan: ImagePlan) -> tuple[Argv, ...]:
    """What those units run, for --dry-run."""
    return ()


def stale_import(plan: ImagePlan) -> str:
    """Why the image file has to be made again, whatever the build says: "" where it is whole, of
    the image of its record, and packed and spread as asked."""
    return ""
