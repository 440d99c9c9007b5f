"""docker: its client builds in its daemon, with BuildKit where that is installed.

Times of files in layers stay those of the build, so that two builds without a common cache have
two digests: BuildKit sets only the image's own time by SOURCE_DATE_EPOCH, and its exporter into
docker's store rewrites none (docs.docker.com/build/ci/github-actions/reproducible-builds).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.images.builders.options import EPOCH_ARGUMENT, recipe_options
from trainkit.images.contract import Argv, BuildRecipe


class Docker:
    """docker-build(1)."""

    name = "docker"

    def is_here(self) -> bool:
        return shutil.which("docker") is not None and _has_daemon()

    def missing(self) -> str:
        if shutil.which("docker") is None:
            return "docker is not in PATH"
        return "docker has no daemon here: no socket, DOCKER_HOST is not set"

    def version_argv(self) -> Argv:
        return ("docker", "version", "--format", "{{.Server.Version}}")

    def build_argv(self, recipe: BuildRecipe, version: str) -> Argv:
        epoch: Argv = ()
        if recipe.source_date_epoch is not None:
            epoch = ("--build-arg", f"{EPOCH_ARGUMENT}={recipe.source_date_epoch}")
        return ("docker", "build", str(recipe.context), *recipe_options(recipe), *epoch)

    def digest_argv(self, image: str) -> Argv:
        return ("docker", "image", "inspect", "--format", "{{.Id}}", image)

    def shell_argv(self, image: str) -> Argv:
        return ()

    def pull_argv(self, image: str) -> Argv:
        return ("docker", "pull", image)

    def push_argv(self, tag: str, target: str) -> tuple[Argv, ...]:
        return (("docker", "tag", tag, target), ("docker", "push", target))

    def store_argv(self) -> Argv:
        return ()

    def remove_argv(self, container: str) -> Argv:
        return ("docker", "rm", "--force", container)


def _has_daemon() -> bool:
    """Whether something is there that could be the daemon's end: a client without one is often
    installed for other uses. docker(1), "Environment variables"; contexts are in config.json."""
    if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT"):
        return True
    home = Path.home() / ".docker"
    sockets = [Path("/var/run/docker.sock"), home / "run/docker.sock", home / "desktop/docker.sock"]
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        sockets.append(Path(folder) / "docker.sock")
    return any(path.exists() for path in sockets) or (home / "contexts").is_dir()
