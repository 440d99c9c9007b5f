"""runtime = "apptainer": the host's network, processes, /dev and /tmp are the container's too.
So would its environment be, without --cleanenv."""

from __future__ import annotations

import shlex

from trainkit.launch.containers.contract import CALLER, Around, Runtime

INSIDE = "APPTAINERENV_"  # before the name of a variable that passes --cleanenv


def apptainer_words(around: Around) -> tuple[str, ...]:
    """apptainer-exec(1)."""
    container = around.container
    mounts = tuple(f"--bind={mount.text}" for mount in around.mounts)
    options = (
        *(("--nv",) if around.gpus else ()),
        *(("--writable-tmpfs",) if container.writable else ()),
    )
    return (
        "apptainer",
        "exec",
        "--cleanenv",
        "--no-home",
        f"--pwd={around.root}",
        *options,
        *mounts,
        *container.args,
        container.image,
        *around.command,
    )


def apptainer_lines(around: Around) -> tuple[str, ...]:
    """What of the node's and of the job's own environment is the container's."""
    own = (
        f'for name in {" ".join(CALLER)}; do [ -z "${{!name+x}}" ] || export'
        f' "{INSIDE}$name=${{!name}}"; done'
    )
    return (
        own,
        *(f"export {INSIDE}{name}={shlex.quote(value)}" for name, value in around.env.items()),
    )


APPTAINER = Runtime("apptainer", apptainer_words, before=apptainer_lines)
