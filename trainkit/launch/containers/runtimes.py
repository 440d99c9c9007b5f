"""The runtimes, by containers.X.runtime, and how a node's agent comes into its container by one of
them. A new one is a file here, a line of RUNTIMES, and its name and traits in
trainkit/jobs/containers.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainkit.launch.containers.apptainer import APPTAINER
from trainkit.launch.containers.contract import NodeContainer, Runtime, line
from trainkit.launch.containers.docker import DOCKER, PODMAN
from trainkit.launch.containers.enroot import ENROOT
from trainkit.launch.containers.pyxis import PYXIS
from trainkit.launch.containers.scripts import FAILED, look_lines

RUNTIMES: Mapping[str, Runtime] = {
    "pyxis": PYXIS,
    "enroot": ENROOT,
    "apptainer": APPTAINER,
    "docker": DOCKER,
    "podman": PODMAN,
}
NOT_STARTED = range(125, 128)  # exit codes of clients, and of shells, that started nothing


def start_lines(container: NodeContainer) -> list[str]:
    """The last lines of node.sh: from the host into the container."""
    runtime = RUNTIMES[container.settings.runtime]
    there = (
        f'command -v {runtime.program} > /dev/null || {{ echo "$HOSTNAME has no {runtime.program},'
        f' the runtime of {container.label}" >&2; {FAILED}; }}'
    )
    variables = {**runtime.variables, **container.env}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return [
        there,
        *look_lines(container),
        *exports,
        *runtime.before(container),
        f"exec {line(runtime.argv(container))}",
    ]


def extra_files(container: NodeContainer) -> Mapping[str, str]:
    """What else the session's folder has to hold, by name."""
    return RUNTIMES[container.settings.runtime].files(container)


def describe_exit(container: NodeContainer, code: int, last: str) -> str:
    """How the start of a container ended, for a person."""
    name = container.settings.runtime
    meaning = RUNTIMES[name].exit_codes.get(code)
    ended = f"{code} ({meaning})" if meaning else str(code)
    return f"{name} ended with {ended}: {last or 'without a word'}"
