"""runtime = "enroot": a .sqsh file entered without a daemon; the host's network, processes and
/dev. Its hooks give it GPUs by NVIDIA_VISIBLE_DEVICES."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainkit.launch.containers.contract import Around, Mount, Raw, Runtime

RC = "enroot.rc"
# for images that do not say it themselves
HOOKS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def enroot_words(around: Around) -> tuple[str, ...]:
    """enroot start. A variable that is named and not there would be set and empty, which hides
    every GPU."""
    container = around.container
    env = tuple(word for name in around.env for word in ("--env", name))
    hooks = tuple(
        word
        for name, value in HOOKS.items()
        if around.gpus and name not in around.env
        for word in ("--env", f"{name}={value}")
    )
    visible = Raw("${CUDA_VISIBLE_DEVICES+--env CUDA_VISIBLE_DEVICES}")
    mounts = tuple(word for mount in around.mounts for word in ("--mount", _mount(mount)))
    writable = ("--rw",) if container.writable else ()
    return (
        "enroot",
        "start",
        *writable,
        "--rc",
        str(around.folder / RC),
        *env,
        *hooks,
        visible,
        *mounts,
        *container.args,
        container.image,
        *around.command,
    )


def _mount(mount: Mount) -> str:
    """A line of fstab(5) with colons, as pyxis makes it."""
    return f"{mount.source}:{mount.target}:x-create=auto,rbind{',ro' if mount.read_only else ''}"


def enroot_files(around: Around) -> Mapping[str, str]:
    """In place of the image's own command script, which may do anything with its arguments."""
    return {RC: f'cd {shlex.quote(around.root)} && exec "$@"\n'}


ENROOT = Runtime("enroot", enroot_words, enroot_files, {"ENROOT_MOUNT_HOME": "no"})
