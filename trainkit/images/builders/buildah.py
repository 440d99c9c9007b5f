"""buildah: builds without a daemon, and without an OCI runtime where there is none.

In OCI's format the same input gives the same digest. In docker's it writes a random host name and
container into the image (1.28), over the same layers; so that is only for what OCI's cannot hold.
Pushed are docker's manifests, which old importers ask for too.
"""

from __future__ import annotations

import shutil

from trainkit.images.builders.options import (
    isolation_options,
    recipe_options,
    version_numbers,
)
from trainkit.images.contract import Argv, BuildRecipe

WITH_TIMESTAMP = (1, 19)  # older ones may not have --timestamp


class Buildah:
    """buildah-build(1). Its options stand before the context: it takes none behind."""

    name = "buildah"

    def is_here(self) -> bool:
        return shutil.which("buildah") is not None

    def missing(self) -> str:
        return "buildah is not in PATH"

    def version_argv(self) -> Argv:
        return ("buildah", "--version")

    def build_argv(self, recipe: BuildRecipe, version: str) -> Argv:
        times: Argv = ()
        if recipe.source_date_epoch is not None and version_numbers(version) >= WITH_TIMESTAMP:
            times = ("--timestamp", str(recipe.source_date_epoch))
        form = "docker" if recipe.docker_format else "oci"
        start = ("buildah", "bud", "--format", form, "--layers", "--pull-never")
        return (
            *start,
            *isolation_options(),
            *times,
            *recipe_options(recipe),
            str(recipe.context),
        )

    def digest_argv(self, image: str) -> Argv:
        return ("buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", image)

    def shell_argv(self, image: str) -> Argv:
        asked = ("--type", "image", "--format", "{{.Docker.Config.Shell}}")
        return ("buildah", "inspect", *asked, image)

    def pull_argv(self, image: str) -> Argv:
        return ("buildah", "pull", image)

    def push_argv(self, tag: str, target: str) -> tuple[Argv, ...]:
        return (("buildah", "push", "--format", "v2s2", tag, f"docker://{target}"),)

    def store_argv(self) -> Argv:
        words = "{{.store.GraphDriverName}} {{.store.GraphRoot}}"
        return ("buildah", "info", "--format", words)

    def remove_argv(self, container: str) -> Argv:
        return ("buildah", "rm", container)
