"""runtime = "pyxis": a plugin of Slurm's, by which a task of srun is in the container from its
start.

So its words are srun's, and what a node lacks has to be looked at by a step without a container
before that.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainkit.base.errors import Exit
from trainkit.launch.containers.contract import NodeContainer, Runtime, ShellText
from trainkit.launch.containers.enroot import QUESTIONS
from trainkit.launch.containers.scripts import FAILED, look_lines

# in the session's folder
LOOK = "mounts.sh"
STEP = "step.sh"
# of watch.connect, for the look at the mounts: its words must be there before the supervisor gives
# up
LOOK_SHARE = 0.9
REMOVAL_MINUTES = 1  # for a root file system of some 20 GB
EVERYTHING = ("ALL", "NONE", "NIL")  # values of --export that are not a list of names


def container_name(container: NodeContainer) -> str:
    """What a run's container is called on every node, where an attempt that follows finds it and
    imports nothing; "" where its table has a name of its own, or none is kept."""
    if not container.since or any(
        word.startswith("--container-name") for word in container.settings.args
    ):
        return ""
    return f"trainkit-{container.run}-{container.since}"


def removal_argv(container: NodeContainer, nodes: int) -> tuple[str, ...]:
    """The line of srun that takes the containers of a run off its nodes, where the plugin does
    not (container_scope=global); none without a name of ours."""
    if not container_name(container):
        return ()
    names = [f"pyxis_trainkit-{container.run}-{since}" for since in range(1, container.since + 1)]
    remove = 'for name; do enroot remove --force "$name"; done'
    step = ("--overlap", "--input=none", "--mpi=none", f"--time={REMOVAL_MINUTES}")
    return (
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *step,
        "/bin/bash",
        "-c",
        remove,
        "remove",
        *names,
    )


def pyxis_options(container: NodeContainer) -> tuple[str, ...]:
    """Options of srun. Variables of the image come before those of the host unless --container-env
    names them."""
    settings = container.settings
    mounts = ",".join(mount.text for mount in container.mounts)
    env = (f"--container-env={','.join(container.env)}",) if container.env else ()
    place = (
        f"--container-workdir={container.root}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *(("--container-writable",) if settings.writable else ()),
    )
    name = (f"--container-name={called}",) if (called := container_name(container)) else ()
    return (
        f"--container-image={container.image}",
        *name,
        f"--container-mounts={mounts}",
        *env,
        *place,
        *settings.args,
    )


def step_argv(container: NodeContainer) -> tuple[str, ...]:
    """A step of the same job, on the one node that asks for it."""
    return (
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--input=none",
        "--mpi=none",
        "--export=ALL",
        *pyxis_options(container),
        ShellText('--nodelist="$SLURMD_NODENAME"'),
        "/bin/bash",
        str(container.script),
    )


def exported(names: str, env: Mapping[str, str]) -> str:
    """srun's --export with these variables, where it is a list."""
    listed = names.split(",")
    if listed[0] in EVERYTHING:
        return names
    return ",".join(dict.fromkeys([*listed, *env]))


def mount_check_seconds(connect: float) -> int:
    """How long the look at the mounts may take, of `watch.connect` seconds."""
    return max(1, int(LOOK_SHARE * connect))


def mount_check_minutes(connect: float) -> int:
    """The same as srun's --time: in whole minutes, only in case that nobody is there to end it."""
    return math.ceil(mount_check_seconds(connect) / 60)


def step_scripts(
    container: NodeContainer, lines: Sequence[Sequence[str]], connect: float
) -> dict[str, str]:
    """What looks at the mounts on each node, and what runs the two lines of srun one after the
    other, by names in the session's folder."""
    look, start = map(shlex.join, lines)
    seconds = mount_check_seconds(connect)
    what = "starts of and mounts" if container.file else "mounts"
    copied = ", or the copy to stage_to," if container.settings.stage_to else ""
    slow = (
        f"nothing was started: no look within {seconds} s at what {container.label} {what}; a"
        f" prolog or a file system that is slow{copied} needs a longer watch.connect"
    )
    missing = f"nothing was started: not every node has what {container.label} {what}"
    failed = f"nothing was started: the step that looks at what {container.label} {what} ended with"
    step = [
        "#!/bin/bash",
        "# the output of tasks is elsewhere: these are srun's words",
        f"said=$(timeout --kill-after=5 {seconds} {look} 2>&1)",
        "code=$?",
        '[ -z "$said" ] || echo "$said"',
        "case $code in",
        "0) ;;",
        f"{int(Exit.START)}) echo {shlex.quote(missing)} ;;",
        f"124 | 137) echo {shlex.quote(slow)} ;;",
        f"""*) echo {shlex.quote(failed)} "$code: ${{said##*$'\\n'}}" ;;""",
        "esac",
        f"[ $code = 0 ] || {FAILED}",
        f"exec {start}",
    ]
    return {
        LOOK: (
            "\n".join(
                [
                    "#!/bin/bash",
                    "# What a node must have before a container starts on it",
                    *look_lines(container),
                ]
            )
            + "\n"
        ),
        STEP: "\n".join(step) + "\n",
    }


# zstd makes 134 MB of 410 (measured)
UNPACKED = replace(QUESTIONS.folders["ENROOT_DATA_PATH"], room=3.0)
PYXIS = Runtime(
    "srun",
    step_argv,
    replace(QUESTIONS, folders={**QUESTIONS.folders, "ENROOT_DATA_PATH": UNPACKED}),
)
