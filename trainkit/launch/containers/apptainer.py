"""runtime = "apptainer": the host's network, processes, /dev and /tmp are the container's too.
So would its environment be, without --cleanenv."""

from __future__ import annotations

import shlex

from trainkit.launch.containers.contract import NodeContainer, NodeQuestions, Runtime, WorkFolder

INSIDE = "APPTAINERENV_"  # before the name of a variable that passes --cleanenv


def apptainer_argv(container: NodeContainer) -> tuple[str, ...]:
    """apptainer-exec(1)."""
    settings = container.settings
    mounts = tuple(f"--bind={mount.text}" for mount in container.mounts)
    options = (
        *(("--nv",) if container.gpus else ()),
        *(("--writable-tmpfs",) if settings.writable else ()),
    )
    return (
        "apptainer",
        "exec",
        "--cleanenv",
        "--no-home",
        f"--pwd={container.root}",
        *options,
        *mounts,
        *settings.args,
        container.image,
        *container.command,
    )


def apptainer_lines(container: NodeContainer) -> tuple[str, ...]:
    """What of the node's and of the job's own environment is the container's."""
    own = (
        f'for name in {" ".join(container.host_variables)}; do [ -z "${{!name+x}}" ] || export'
        f' "{INSIDE}$name=${{!name}}"; done'
    )
    return (
        own,
        *(f"export {INSIDE}{name}={shlex.quote(value)}" for name, value in container.env.items()),
    )


APPTAINER = Runtime(
    "apptainer",
    apptainer_argv,
    NodeQuestions(
        "apptainer",
        folders={
            "APPTAINER_CACHEDIR": WorkFolder(
                "$HOME/.apptainer/cache", room_to_import=1.0, locked=True
            ),
            "APPTAINER_TMPDIR": WorkFolder(
                "${TMPDIR:-/tmp}", room_to_import=1.0, holds="what is unpacked for a moment"
            ),
        },
    ),
    before=apptainer_lines,
)
