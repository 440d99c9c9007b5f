"""From a docker or podman image, or one of a registry, to a .sqsh file by `enroot import`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.images.contract import Argv, FailureHint, ImagePlan, OnStep
from trainkit.images.importers.published import published
from trainkit.images.importers.squash_options import ENROOT_VARIABLE, SUFFIX, squash_options
from trainkit.images.programs import run_program
from trainkit.jobs.containers import Squashfs

SCHEMES = {"docker": "dockerd", "podman": "podman"}  # by builder: what enroot calls its images
MISSING = (
    "install enroot on this machine, or set builder = 'buildah', which makes the file with"
    " mksquashfs"
)


def enroot_source(plan: ImagePlan) -> str:
    """What is imported, as enroot names it. Raises KeyError for a builder whose images enroot
    does not read (buildah)."""
    if plan.container.source:
        return plan.container.source
    return f"{SCHEMES[plan.builder]}://{plan.tag}"


def import_argv(output: Path, source: str) -> Argv:
    """enroot import (doc/cmd/import.md). It refuses an output that is there already."""
    return ("enroot", "import", "--output", str(output), source)


def import_variables(squash: Squashfs | None) -> Mapping[str, str]:
    """What enroot takes from its environment. Without `squash` the site's enroot.conf counts."""
    if squash is None:
        return {}
    return {ENROOT_VARIABLE: " ".join(squash_options(squash))}


class EnrootImport:
    """enroot's own import."""

    name = "enroot"
    hints: Sequence[FailureHint] = (
        FailureHint(
            "no space left on device",
            "the disk is full",
            "make room: enroot unpacks below ENROOT_TEMP_PATH (else TMPDIR, else /tmp) and keeps"
            " layers below ENROOT_CACHE_PATH (else ~/.cache/enroot)",
        ),
        FailureHint(
            r"\b401\b|\b403\b",
            "the registry wants to know who asks",
            "enroot keeps credentials in ~/.config/enroot/.credentials: machine HOST login USER"
            " password WORD (doc/cmd/import.md)",
        ),
        FailureHint(r"\b404\b", "the registry has no such image", "look at the name and its tag"),
        FailureHint(
            "could not resolve host|failed to connect to",
            "the registry cannot be reached from here",
            "look at the name, or at the way to the network from this machine (https_proxy)",
        ),
        FailureHint(
            "invalid image reference",
            "that is not an image as enroot names them",
            "docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE[:TAG], podman://IMAGE[:TAG]",
        ),
    )

    def serves(self, plan: ImagePlan) -> bool:
        return SUFFIX in plan.container.runtime_traits.files and plan.builder != "buildah"

    def commands(self, plan: ImagePlan, file: Path) -> tuple[Argv, ...]:
        variables = import_variables(plan.container.squashfs)
        # as a person types it: the variable's value has blanks
        env = ("env", *(f"{name}={value}" for name, value in variables.items()))
        argv = import_argv(file, enroot_source(plan))
        return ((*env, *argv),) if variables else (argv,)

    def run(self, plan: ImagePlan, file: Path, on_step: OnStep) -> None:
        on_step(0, 1)
        with published(file) as made:
            run_program(
                import_argv(made, enroot_source(plan)),
                variables=import_variables(plan.container.squashfs),
                missing=MISSING,
                hints=self.hints,
            )
        on_step(1, 1)
