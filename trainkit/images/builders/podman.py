"""podman: builds without a daemon, with buildah's own engine and store.

Always in docker's format: podman does not say whether a base has a SHELL, which OCI's lacks. In
docker's format buildah's engine writes a random host name into the image (1.28), so that two
builds without a common cache have two digests over the same layers.
"""

from __future__ import annotations

import shutil

from trainkit.images.builders.options import (
    isolation_options,
    recipe_options,
    version_numbers,
)
from trainkit.images.contract import Argv, BuildRecipe

WITH_TIMESTAMP = (3, 0)  # older ones may not have --timestamp


class Podman:
    """podman-build(1)."""

    name = "podman"

    def is_here(self) -> bool:
        return shutil.which("podman") is not None

    def missing(self) -> str:
        return "podman is not in PATH"

    def version_argv(self) -> Argv:
        return ("podman", "--version")

    def build_argv(self, recipe: BuildRecipe, version: str) -> Argv:
        times: Argv = ()
        if recipe.source_date_epoch is not None and version_numbers(version) >= WITH_TIMESTAMP:
            times = ("--timestamp", str(recipe.source_date_epoch))
        start = ("podman", "build", "--format", "docker", "--layers", "--pull=never")
        return (
            *start,
            *isolation_options(),
            *times,
            *recipe_options(recipe),
            str(recipe.context),
        )

    def digest_argv(self, image: str) -> Argv:
        return ("podman", "image", "inspect", "--format", "{{.Id}}", image)

    def shell_argv(self, image: str) -> Argv:
        return ()

    def pull_argv(self, image: str) -> Argv:
        return ("podman", "pull", image)

    def push_argv(self, tag: str, target: str) -> tuple[Argv, ...]:
        return (("podman", "push", "--format", "v2s2", tag, target),)

    def store_argv(self) -> Argv:
        words = "{{.Store.GraphDriverName}} {{.Store.GraphRoot}}"
        return ("podman", "info", "--format", words)

    def remove_argv(self, container: str) -> Argv:
        # without it podman removes none that it did not make by `podman create`
        return ("podman", "rm", "--force", container)
