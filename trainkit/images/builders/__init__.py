"""Programs that build images, one file each, and which of them is used."""

from __future__ import annotations

from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.builders.buildah import Buildah
from trainkit.images.builders.docker import Docker
from trainkit.images.builders.podman import Podman
from trainkit.images.contract import Builder
from trainkit.jobs.containers import Container

# in the order in which they are looked for
BUILDERS: dict[str, Builder] = {
    builder.name: builder for builder in (Docker(), Podman(), Buildah())
}


def candidates(container: Container) -> tuple[Builder, ...]:
    """Builders whose images the container's runtime can start: of its own store, of a file, or
    where they come through a registry."""
    names = container.runtime_traits.stores or tuple(BUILDERS)
    if container.registry is not None:
        names = tuple(dict.fromkeys((*names, *BUILDERS)))
    return tuple(BUILDERS[name] for name in names)


def choose_builder(named: str | None, container: Container) -> tuple[Builder, str]:
    """The builder that is used, and why, for people.

    Args:
        named: by jobs.toml or --builder; None: the first that is here.
        container: what it builds for.

    Raises TrainkitError (exit 6) where it is not here, or the runtime would not find the image.
    """
    fitting = candidates(container)
    names = ", ".join(builder.name for builder in fitting)
    if named is not None:
        builder = BUILDERS[named]
        if builder not in fitting:
            raise TrainkitError(
                f"containers.{container.name}: runtime = '{container.runtime}' does not see what"
                f" {named} builds",
                exit=Exit.STAGE_FAILED,
                hint=f"build with {names}, or name a registry that both of them know",
            )
        if not builder.is_here():
            raise _none_here(f"builder '{named}' is not here: {builder.missing()}")
        return builder, f"{named}, as named"
    for builder in fitting:
        if builder.is_here():
            return builder, f"{builder.name}, the first here of {names}"
    raise _none_here("; ".join(["no builder is here", *(each.missing() for each in fitting)]))


def first_here(container: Container) -> str:
    """The name of the builder that is used where none is named; "" where none is here."""
    return next((each.name for each in candidates(container) if each.is_here()), "")


def _none_here(message: str) -> TrainkitError:
    return TrainkitError(
        message,
        exit=Exit.STAGE_FAILED,
        hint=(
            "install one of them (Debian: apt-get install buildah), or build where one is and copy"
            " the image file to ROOT/images"
        ),
    )
