"""Programs that make an image file of an image, one file each; the first that serves is used."""

from __future__ import annotations

from trainkit.images.contract import ImagePlan, Importer
from trainkit.images.importers.apptainer import ApptainerBuild
from trainkit.images.importers.enroot import EnrootImport
from trainkit.images.importers.mksquashfs import SquashfsImport

IMPORTERS: tuple[Importer, ...] = (EnrootImport(), SquashfsImport(), ApptainerBuild())


def importer_of(plan: ImagePlan) -> Importer | None:
    """What makes the image file of a plan; None where ranks start an image of docker's or
    podman's own store, or nothing here makes such a file."""
    if plan.image_file is None:
        return None
    return next((importer for importer in IMPORTERS if importer.serves(plan)), None)
