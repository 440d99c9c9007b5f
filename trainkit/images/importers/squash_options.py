"""How the file system in a .sqsh file is packed: the same words for mksquashfs and for enroot."""

from __future__ import annotations

from trainkit.jobs.containers import Squashfs

SUFFIX = ".sqsh"  # of the files that are made
ENROOT_VARIABLE = "ENROOT_SQUASH_OPTIONS"
# enroot's own (enroot.in): data are not compressed, only names and tables
ENROOT_DEFAULT = ("-comp", "lzo", "-noD", "-exit-on-error")


def squash_options(squash: Squashfs | None) -> tuple[str, ...]:
    """Options of mksquashfs(1); enroot's where nothing is asked for."""
    if squash is None:
        return ENROOT_DEFAULT
    level: tuple[str, ...] = ()
    if squash.level is not None:
        level = ("-Xcompression-level", str(squash.level))
    return ("-comp", squash.compression, *level, "-exit-on-error")
