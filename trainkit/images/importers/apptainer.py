"""From an image to a .sif file by apptainer-build(1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.images.contract import Argv, FailureHint, ImagePlan, OnStep
from trainkit.images.importers.published import published
from trainkit.images.programs import run_program

MISSING = "install apptainer on this machine, or set runtime to what the nodes have"
ARCHIVE = ".tar"  # after the image file's name: what apptainer reads of podman's and buildah's


def apptainer_source(plan: ImagePlan, archive: Path) -> str:
    """What is built of, as apptainer names it: docker's daemon is asked; what podman and buildah
    have is in `archive`. The registry of a source ends with '/' there, with '#' for enroot."""
    source = plan.container.source
    scheme, _, name = (source or "").partition("://")
    if scheme == "docker":
        return f"docker://{name.replace('#', '/', 1)}"
    if source:
        builder = {"dockerd": "docker"}.get(scheme, scheme)
    else:
        builder = plan.builder
        name = plan.tag
    if builder == "docker":
        return f"docker-daemon://{name}"
    return f"docker-archive:{archive}"


def save_argv(plan: ImagePlan, archive: Path) -> Argv:
    """Writes an image of podman's or buildah's store as docker-archive (containers-transports(5));
    no words where apptainer needs none."""
    if not apptainer_source(plan, archive).startswith("docker-archive:"):
        return ()
    tag = (plan.container.source or "").partition("://")[2] or plan.tag
    if plan.builder == "buildah":
        return ("buildah", "push", tag, f"docker-archive:{archive}:{tag}")
    return ("podman", "save", "--format", "docker-archive", "--output", str(archive), tag)


def build_argv(output: Path, source: str) -> Argv:
    """apptainer build. It asks before it writes over an output that is there."""
    return ("apptainer", "build", str(output), source)


class ApptainerBuild:
    """apptainer's own build."""

    name = "apptainer"
    hints: Sequence[FailureHint] = (
        FailureHint(
            "no space left on device",
            "the disk is full",
            "make room: apptainer unpacks below APPTAINER_TMPDIR (else TMPDIR, else /tmp)",
        ),
    )

    def serves(self, plan: ImagePlan) -> bool:
        return ".sif" in plan.container.runtime_traits.files

    def commands(self, plan: ImagePlan, file: Path) -> tuple[Argv, ...]:
        archive = file.with_name(file.name + ARCHIVE)
        save = save_argv(plan, archive)
        build = build_argv(file, apptainer_source(plan, archive))
        return (save, build, ("rm", str(archive))) if save else (build,)

    def run(self, plan: ImagePlan, file: Path, on_step: OnStep) -> None:
        with published(file) as made:
            archive = made.with_name(made.name + ARCHIVE)
            try:
                on_step(0, 2)
                if save := save_argv(plan, archive):
                    run_program(save)
                on_step(1, 2)
                build = build_argv(made, apptainer_source(plan, archive))
                run_program(build, missing=MISSING, hints=self.hints)
            finally:
                archive.unlink(missing_ok=True)
        on_step(2, 2)
