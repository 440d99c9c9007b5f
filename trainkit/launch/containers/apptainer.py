"""runtime = "apptainer": the host's network, processes, /dev, /tmp and environment are the container's too; so only GPUs and mounts are asked for."""

from __future__ import annotations

from trainkit.launch.containers.contract import Around, Runtime


def apptainer_words(around: Around) -> tuple[str, ...]:
    """apptainer-exec(1)."""
    container = around.container
    mounts = tuple(f"--bind={mount.text}" for mount in around.mounts)
    options = (*(("--nv",) if around.gpus else ()), *(("--writable-tmpfs",) if container.writable else ()))
    return ("apptainer", "exec", "--no-home", f"--pwd={around.root}", *options, *mounts, *container.args, container.image, *around.command)


APPTAINER = Runtime("apptainer", apptainer_words)
