"""Programs that build images, one file each, and which of them is used."""

from __future__ import annotations

from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.builders.buildah import Buildah
from trainkit.images.builders.docker import Docker
from trainkit.images.builders.podman import Podman
from trainkit.images.contract import Builder

# in the order in which they are looked for
BUILDERS: dict[str, Builder] = {
    builder.name: builder for builder in (Docker(), Podman(), Buildah())
}


def choose_builder(named: str | None) -> tuple[Builder, str]:
    """The builder that is used, and why, for people.

    Args:
        named: by jobs.toml or --builder; None: the first that is here.

    Raises TrainkitError (exit 6) where it is not here.
    """
    if named is not None:
        builder = BUILDERS[named]
        if not builder.is_here():
            raise _none_here(f"builder '{named}' is not here: {builder.missing()}")
        return builder, f"{named}, as named"
    for builder in BUILDERS.values():
        if builder.is_here():
            return builder, f"{builder.name}, the first here of {', '.join(BUILDERS)}"
    reasons = "; ".join(builder.missing() for builder in BUILDERS.values())
    raise _none_here(f"no builder is here: {reasons}")


def builder_here(named: str | None) -> Builder | None:
    """The same, None where it is not here."""
    try:
        return choose_builder(named)[0]
    except TrainkitError:
        return None


def _none_here(message: str) -> TrainkitError:
    return TrainkitError(
        message,
        exit=Exit.STAGE_FAILED,
        hint=(
            "install one of them (Debian: apt-get install buildah), or build where one is and copy"
            " the image file to ROOT/images"
        ),
    )
