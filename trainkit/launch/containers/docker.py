"""runtime = "docker" and "podman": OCI containers in the host's own network, shared memory and
processes.

Network and shared memory are the host's because NCCL and Gloo want both; processes, so that a
run's are found by their mark from outside. What docker started outlives its client: the agent
ends by itself when its supervisor is gone, and with it the container and everything in it.
"""

from __future__ import annotations

from trainkit.launch.containers.contract import (
    Mount,
    NodeContainer,
    NodeQuestions,
    Runtime,
    ShellText,
)

ROOT = '[ "$(id -u)" = 0 ]'
USER = '--user="$(id -u):$(id -g)"'
# --user alone takes the caller's other groups away, and with them what they may read: project
# folders belong to a group
GROUPS = "$(for group in $(id -G); do echo --group-add=$group; done)"
# of rootless podman, whose users are others inside; keep-groups is crun's
KEEP = f"$({ROOT} || echo --userns=keep-id --group-add=keep-groups)"
# as both clients say it: what was made then and does not run never will
LONG_AGO = "hour|day|week|month|year"
# --mount, since -v makes a folder of a source that is not there
COMMON = (
    "--network=host",
    "--ipc=host",
    "--pid=host",
    "--ulimit=memlock=-1",
    "--ulimit=stack=67108864",
)
# What the clients' own exit codes mean: docker-run(1), podman-run(1)
EXIT_CODES = {
    125: "it could not start the container",
    126: "a program in the image cannot be run",
    127: "a program is not in the image",
}


def oci_argv(container: NodeContainer, program: str, *devices: str) -> tuple[str, ...]:
    """docker-run(1), podman-run(1), as far as both are the same."""
    settings = container.settings
    name = ShellText(f'--name=trainkit-{container.run}-{container.attempt}-"$1"')
    start = (
        program,
        "run",
        "--rm",
        name,
        f"--label=trainkit.run={container.run}",
        "--pull=never",
        "--entrypoint=/bin/bash",
    )
    # their values are taken from around the client
    env = tuple(f"--env={name}" for name in (*container.host_variables, *container.env))
    mounts = tuple(map(_mount, container.mounts))
    place = (*COMMON, ShellText(USER), f"--workdir={container.root}")
    return (
        *start,
        *place,
        *devices,
        *env,
        *mounts,
        *settings.args,
        container.image,
        *container.command[1:],
    )


def _mount(mount: Mount) -> str:
    read_only = ",readonly" if mount.read_only else ""
    return f"--mount=type=bind,source={mount.source},target={mount.target}{read_only}"


def docker_argv(container: NodeContainer) -> tuple[str, ...]:
    return oci_argv(
        container, "docker", ShellText(GROUPS), *(("--gpus=all",) if container.gpus else ())
    )


def podman_argv(container: NodeContainer) -> tuple[str, ...]:
    """GPUs come by the Container Device Interface."""
    return oci_argv(
        container,
        "podman",
        ShellText(KEEP),
        *(("--device=nvidia.com/gpu=all",) if container.gpus else ()),
    )


def leftovers_line(program: str, age: str = LONG_AGO) -> str:
    """Takes away what clients left that were killed between making a container and starting it:
    --rm comes with an end only. Never one that runs or has run. No `container prune`: podman 4.3
    forgets one of two filters now and then."""
    names = (
        f"timeout 5 {program} ps --all --format '{{{{.Names}}}} {{{{.Status}}}}"
        f" {{{{.RunningFor}}}}' | grep -E '^trainkit-[^ ]+ Created .*({age})'"
    )
    return (
        f"{{ {names} | cut -d ' ' -f 1 | timeout 5 xargs --no-run-if-empty {program} rm; }} >"
        " /dev/null 2>&1 || true"
    )


def _inspect(program: str) -> tuple[str, ...]:
    return (program, "image", "inspect", "--format", "{{.Id}} {{.Size}}")


DOCKER = Runtime(
    "docker",
    docker_argv,
    NodeQuestions(
        "docker",
        daemon=("docker", "version", "--format", "{{.Server.Version}}"),
        inspect=_inspect("docker"),
    ),
    before=lambda container: (leftovers_line("docker"),),
    exit_codes=EXIT_CODES,
)
PODMAN = Runtime(
    "podman",
    podman_argv,
    NodeQuestions("podman", inspect=_inspect("podman"), subordinate_ids=True),
    before=lambda container: (leftovers_line("podman"),),
    exit_codes=EXIT_CODES,
)
