"""runtime = "docker" and "podman": OCI containers in the host's own network, shared memory and processes.

Network and shared memory are the host's because NCCL and Gloo want both; processes, so that a run's are found by their mark from outside. What docker
started outlives its client: the agent ends by itself when its supervisor is gone, and with it the container and everything in it.
"""

from __future__ import annotations

from trainkit.launch.containers.contract import Around, Mount, Raw, Runtime

ROOT = '[ "$(id -u)" = 0 ]'
# An ordinary user has no entry in the image's passwd: torch asks for a name, and caches go to HOME
AS_CALLER = ('--user="$(id -u):$(id -g)"', f"$({ROOT} || echo --env=HOME=/tmp)")
# --mount, since -v makes a folder of a source that is not there
COMMON = ("--network=host", "--ipc=host", "--pid=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864")


def run_words(around: Around, program: str, *devices: str) -> tuple[str, ...]:
    """docker-run(1), podman-run(1), as far as both are the same."""
    container = around.container
    name = Raw(f'--name=trainkit-{around.run}-{around.attempt}-"$1"')
    start = (program, "run", "--rm", name, f"--label=trainkit.run={around.run}", "--pull=never", "--entrypoint=/bin/bash")
    env = tuple(f"--env={name}" for name in ("USER", "LOGNAME", "CUDA_VISIBLE_DEVICES", *around.env))  # their values are taken from around the client
    mounts = tuple(map(_mount, around.mounts))
    place = (*COMMON, *map(Raw, AS_CALLER), f"--workdir={around.root}")
    return (*start, *place, *devices, *env, *mounts, *container.args, container.image, *around.command[1:])


def _mount(mount: Mount) -> str:
    return f"--mount=type=bind,source={mount.source},target={mount.target}{',readonly' if mount.read_only else ''}"


def docker_words(around: Around) -> tuple[str, ...]:
    return run_words(around, "docker", *(("--gpus=all",) if around.gpus else ()))


def podman_words(around: Around) -> tuple[str, ...]:
    """Without root a user is somebody else inside unless told otherwise; GPUs come by the Container Device Interface."""
    return run_words(around, "podman", Raw(f"$({ROOT} || echo --userns=keep-id)"), *(("--device=nvidia.com/gpu=all",) if around.gpus else ()))


DOCKER = Runtime("docker", docker_words)
PODMAN = Runtime("podman", podman_words)
