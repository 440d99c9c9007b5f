"""What ranks have in their environment: it follows from launch/world.json alone. And what the
world is made of: ports, slots, devices, secrets."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence

from trainkit.base.errors import ConfigError, raise_problems
from trainkit.base.extras import MissingExtra
from trainkit.base.redact import SHORTEST
from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.protocol.frames import StartParent
from trainkit.runs.folder import AttemptFolder
from trainkit.runs.world import RunWorld, WorldNode

# below Linux's ephemeral range, so that no outgoing connection takes one meanwhile
PORTS = range(20000, 32000)
CANDIDATES = 64
# What local ranks have of their caller's environment. Everything else they need is named in
# jobs.toml. On other hosts they have what a login there gives.
PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
)
# what a rank has beside what all ranks of its node have in common: read when a process group is
# made or a GPU first used, not while importing
OWN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


def port_candidates(seed: str) -> list[int]:
    """Ports to try in turn; `seed` (the run and attempt) decides."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    return [PORTS[(start + i * 7) % len(PORTS)] for i in range(CANDIDATES)]


def passed_environment() -> dict[str, str]:
    """The environment of a local agent."""
    return {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}


def slot_names(job: Job, host: Host) -> list[str]:
    """The slots the job takes on a host: "cpu", or one a GPU, by the numbers that
    CUDA_VISIBLE_DEVICES gives them (the ranks see it too)."""
    if job.cluster.launcher_traits.batch:
        return []  # the scheduler shares out its nodes itself
    if job.cluster.device_type == "cpu":
        return ["cpu"]
    return [f"gpu{number}" for number in visible_devices(job, host)]


def visible_devices(job: Job, host: Host) -> list[str]:
    """GPUs of the job's ranks on a host: the hostfile's slots; on this machine alone, the first
    of those that the caller may see."""
    if not job.cluster.launcher_traits.one_machine:
        return [str(slot) for slot in host.slots]
    seen = {**os.environ, **job.environment}.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in seen.split(",") if name.strip()]
    return (visible or list(map(str, range(job.ranks_per_node))))[: job.ranks_per_node]


def secrets_of(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """All secrets of a run: those of its ranks, and those of who tells people. Raises as
    `secret_values`."""
    return secret_values((*job.cluster.secrets, *job.notify.secret_names), environment)


def secrets_of_ranks(job: Job, secrets: Mapping[str, str]) -> dict[str, str]:
    """Those that the ranks' environment holds."""
    names = {name.rstrip("?") for name in job.cluster.secrets}
    return {name: value for name, value in secrets.items() if name in names}


def secret_values(names: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of the named secrets.

    Raises ConfigError naming every one that must be there and is not ("NAME?" may be absent),
    and every one too short to be kept out of logs.
    """
    missing = [n for n in names if not n.endswith("?") and not environment.get(n)]
    short = [n for n in names if 0 < len(environment.get(n.rstrip("?"), "")) < SHORTEST]
    if short:
        raise ConfigError(
            f"secrets of fewer than {SHORTEST} characters cannot be kept out of logs:"
            f" {', '.join(short)}"
        )
    if missing:
        raise ConfigError(
            f"secrets not in the environment: {', '.join(missing)}",
            hint=(
                "export them; clusters.X.secrets, which may have optional ones as NAME?, and"
                " [notify] name them"
            ),
        )
    plain = [n.rstrip("?") for n in names]
    return {n: environment[n] for n in plain if environment.get(n)}


def refuse_without_wandb(job: Job) -> None:
    """Raise ConfigError where the job asks for Weights & Biases and its ranks could not have it;
    before there is a run."""
    if job.wandb is None:
        return
    from trainkit.train.metrics.wandb import wandb_problems

    pods = job.cluster.kubernetes if job.cluster.launcher_traits.pods else None
    # pods have theirs of Kubernetes: what is known here is only where from
    secrets = pods.secrets if pods else secret_values(job.cluster.secrets, os.environ)
    environment = {**job.environment, **secrets}
    problems = wandb_problems(job, environment)
    # ./inv can mend that by itself
    if len(problems) == 1 and importlib.util.find_spec("wandb") is None:
        raise MissingExtra(problems[0].message, "wandb", otherwise="or leave out wandb")
    raise_problems(problems)


def started_ranks(world: RunWorld, spawn: str) -> list[Sequence[int]]:
    """The ranks that each node's agent starts, by `Command.spawn`."""
    if spawn == "per_rank":
        return [node.ranks for node in world.nodes]
    return [
        node.ranks[:1] if number == 0 or spawn == "per_node" else ()
        for number, node in enumerate(world.nodes)
    ]


def parent_frame(command: Command, seconds: float) -> StartParent | None:
    """What has an agent start the command's rank parent; None where it has none.

    Args:
        command: of the ranks.
        seconds: that ranks wait for it.
    """
    if command.parent is None:
        return None
    return StartParent(command.parent, dict(command.env), str(command.cwd), OWN_VARIABLES, seconds)


def rank_environment(
    world: RunWorld, node_rank: int, local_rank: int, attempt: AttemptFolder
) -> dict[str, str]:
    """What one rank has in its environment beyond what its host gives it: the command's, torch's
    variables, and where to report.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are torchrun's (PyTorch documentation, "torchrun"), TORCHELASTIC_ERROR_FILE too.
    The agent adds secrets, TRAINKIT_HEARTBEAT_FILE (where the rank says how far it is),
    TRAINKIT_PARENT_PID (whose end ends the rank) and TRAINKIT_RUN (by which a process is known
    as the run's).
    """
    node = world.nodes[node_rank]
    rank = node.ranks[local_rank]
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(node.ranks)),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(world.nodes)),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_ERROR_FILE": str(attempt.error(rank)),
    }
    return {**_devices_and_network(world, node), **world.environment, **own}


def _devices_and_network(world: RunWorld, node: WorldNode) -> dict[str, str]:
    """Which GPUs, and which interface: gloo would take the one that the host's own name stands
    for, which on many machines is the loopback one."""
    found = {} if node.visible is None else {"CUDA_VISIBLE_DEVICES": node.visible}
    if world.master_addr == "127.0.0.1":
        return found | {"GLOO_SOCKET_IFNAME": "lo"}
    if node.interface:
        found["GLOO_SOCKET_IFNAME"] = node.interface
        if world.network:
            found["NCCL_SOCKET_IFNAME"] = f"={node.interface}"
    return found
