"""What every runtime's scripts have in common: what is looked at outside of the container, and what
is run inside."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainkit.base.errors import Exit
from trainkit.launch.containers.contract import NODE, SHARED_MEMORY, NodeContainer
from trainkit.launch.containers.image_files import image_lines

FAILED = f"exit {int(Exit.START)}"
# The host's home is not there, and an image may know another or none; caches go to it, which users
# of a node must not share
HOME_LINE = (
    '[ -w "${HOME:-/}" ] || { export HOME="/tmp/home-$(id -u)"; mkdir -p -m 700 "$HOME"; [ -O'
    f' "$HOME" ]; }} || {{ echo "$HOSTNAME: $HOME cannot be the home of $(id -u)" >&2; {FAILED}; }}'
)


def mount_check_lines(container: NodeContainer) -> list[str]:
    """Lines of bash that end the script, naming all that is missing, unless the source of every
    mount is on this node."""
    folder = shlex.quote(container.node_folder)
    if container.node_folder == SHARED_MEMORY:
        make = []
    else:
        make = [f"[ -d {folder} ] || {{ mkdir -p {folder} && chmod 1777 {folder}; }}"]
    sources = " ".join(shlex.quote(mount.source) for mount in container.mounts)
    return [
        *make,
        "missing=()",
        f'for source in {sources}; do [ -e "$source" ] || missing+=("$source"); done',
        (
            f'[ ${{#missing[@]}} = 0 ] || {{ echo "$HOSTNAME does not have what {container.label}'
            f' mounts: ${{missing[*]}}" >&2; {FAILED}; }}'
        ),
    ]


def look_lines(container: NodeContainer) -> list[str]:
    """Lines of bash that end the script unless this node has all that the container starts of:
    the mounts, and the image's file, copied to the node where that is asked for."""
    image = image_lines(container.file) if container.file else []
    return [*mount_check_lines(container), *image]


def inside_script(container: NodeContainer, agent: Sequence[str], marked: str) -> str:
    """inside.sh. `agent`: the arguments of the interpreter; `marked`: the line that says whose it
    is; "" for none."""
    python = shlex.quote(container.settings.python)
    lines = [
        "#!/bin/bash",
        f"# What {container.settings.image} runs on every node of this session: inside.sh NODE",
        "set -e",
        HOME_LINE,
        *container.settings.prolog,
        (
            f'command -v {python} > /dev/null || {{ echo "$HOSTNAME: the image has no'
            f' {container.settings.python} ({container.label}.python)" >&2; {FAILED}; }}'
        ),
        *([marked] if marked else []),
        f"exec {python} {shlex.join(agent)} {NODE}",
    ]
    return "\n".join(lines) + "\n"
