"""runtime = "pyxis": a plugin of Slurm's, by which a task of srun is in the container from its start.

So its words are srun's, and what a node lacks has to be looked at by a step without a container before that.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from trainkit.launch.containers.contract import Around
from trainkit.launch.containers.scripts import FAILED, mount_lines

LOOK, STEP = "mounts.sh", "step.sh"  # in the session's folder
LOOK_MINUTES = 1  # a file system that does not answer in that time is not there
EVERYTHING = ("ALL", "NONE", "NIL")  # values of --export that are no list of names


def pyxis_words(around: Around) -> tuple[str, ...]:
    """srun's words. Variables of the image come before those of the host unless --container-env names them."""
    container = around.container
    mounts = ",".join(mount.text for mount in around.mounts)
    env = (f"--container-env={','.join(around.env)}",) if around.env else ()
    place = (f"--container-workdir={around.root}", "--no-container-mount-home", *(("--container-writable",) if container.writable else ()))
    return (f"--container-image={container.image}", f"--container-mounts={mounts}", *env, *place, *container.args)


def exported(names: str, env: Mapping[str, str]) -> str:
    """srun's --export with these variables, where it is a list."""
    listed = names.split(",")
    return names if listed[0] in EVERYTHING else ",".join(dict.fromkeys([*listed, *env]))


def step_scripts(around: Around, lines: Sequence[Sequence[str]]) -> dict[str, str]:
    """What looks at the mounts on each node, and what runs the two lines of srun one after the other, by names in the session's folder."""
    look, start = map(shlex.join, lines)
    nothing = f"nothing was started: not every node has what {around.called} mounts"
    return {
        LOOK: "\n".join(["#!/bin/bash", "# What a node must have before a container starts on it", *mount_lines(around)]) + "\n",
        STEP: f"#!/bin/bash\ntimeout --kill-after=10 {60 * LOOK_MINUTES} {look} || {{ echo {shlex.quote(nothing)}; {FAILED}; }}\nexec {start}\n",
    }
