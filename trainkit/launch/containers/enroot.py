"""runtime = "enroot": a .sqsh file entered without a daemon; the host's network, processes and
/dev. Its hooks give it GPUs by NVIDIA_VISIBLE_DEVICES."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainkit.launch.containers.contract import (
    Mount,
    NodeContainer,
    NodeQuestions,
    Runtime,
    ShellText,
    WorkFolder,
)

RC = "enroot.rc"
# for images that do not say it themselves
HOOKS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def enroot_argv(container: NodeContainer) -> tuple[str, ...]:
    """enroot start. A variable that is named and not there would be set and empty, which hides
    every GPU."""
    settings = container.settings
    env = tuple(word for name in container.env for word in ("--env", name))
    hooks = tuple(
        word
        for name, value in HOOKS.items()
        if container.gpus and name not in container.env
        for word in ("--env", f"{name}={value}")
    )
    visible = [
        ShellText(f"${{{name}+--env {name}}}")
        for name in ("CUDA_VISIBLE_DEVICES", *container.passed)
    ]
    mounts = tuple(word for mount in container.mounts for word in ("--mount", _mount(mount)))
    writable = ("--rw",) if settings.writable else ()
    return (
        "enroot",
        "start",
        *writable,
        "--rc",
        str(container.folder / RC),
        *env,
        *hooks,
        *visible,
        *mounts,
        *settings.args,
        container.image,
        *container.command,
    )


def _mount(mount: Mount) -> str:
    """A line of fstab(5) with colons, as pyxis makes it."""
    return f"{mount.source}:{mount.target}:x-create=auto,rbind{',ro' if mount.read_only else ''}"


def enroot_files(container: NodeContainer) -> Mapping[str, str]:
    """In place of the image's own command script, which may do anything with its arguments."""
    return {RC: f'cd {shlex.quote(container.root)} && exec "$@"\n'}


# A login shell reads /etc/profile, where Debian sets PATH again: the image's own, with its Python,
# would be lost.
SETTINGS = {"ENROOT_MOUNT_HOME": "no", "ENROOT_LOGIN_SHELL": "no"}
QUESTIONS = NodeQuestions(
    "enroot",
    version=("version",),
    folders={
        "ENROOT_RUNTIME_PATH": WorkFolder(
            "${XDG_RUNTIME_DIR:-/run}/enroot",
            holds="the working folders of running containers",
            runs=True,
        ),
        "ENROOT_CACHE_PATH": WorkFolder(
            "${XDG_CACHE_HOME:-$HOME/.cache}/enroot", room_to_import=1.0, locked=True
        ),
        "ENROOT_DATA_PATH": WorkFolder(
            "${XDG_DATA_HOME:-$HOME/.local/share}/enroot", locked=True, runs=True
        ),
        "ENROOT_TEMP_PATH": WorkFolder(
            "${TMPDIR:-/tmp}", room_to_import=1.0, holds="what is unpacked for a moment"
        ),
    },
    config="${ENROOT_SYSCONF_PATH:-/etc/enroot}/enroot.conf",
)
ENROOT = Runtime("enroot", enroot_argv, QUESTIONS, enroot_files, SETTINGS)
