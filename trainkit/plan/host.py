"""Memory of a node: all ranks that run there together, beside what the node has."""

from __future__ import annotations

import re

from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.jobs import sbatch
from trainkit.jobs.kubernetes import quantity
from trainkit.jobs.schema import Job
from trainkit.plan.layout import Layout
from trainkit.plan.memory import Memory, copies_of_state
from trainkit.plan.rules import Rules

GIB = 2**30
# Of the host's memory, one rank on another device than the CPU: interpreter, libraries, the
# driver's
# part, batches on their way; assumed.
RANK_BYTES = 3 * GIB
_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class HostMemory:
    """Memory of the node that needs most.

    Args:
        node: which, from 0.
        needed_bytes: of all its ranks.
        available_bytes: what a node has, or what Slurm is asked for; None: unknown.
        source: whose word that is; None: nobody's.
    """

    node: int
    needed_bytes: int
    available_bytes: int | None
    source: str | None

    @property
    def fits(self) -> bool | None:
        """Whether the ranks fit; None where nobody says what a node has."""
        if self.available_bytes is None:
            return None
        return self.needed_bytes <= self.available_bytes

    def to_json(self) -> dict[str, object]:
        """plan/1's `host_memory`."""
        return {**asdict(self), "fits": self.fits}


def slurm_bytes(size: str | int) -> int | None:
    """sbatch's --mem in bytes: MiB without a unit; None for 0, which is all there is.

    Raises ValueError for what is not a size of Slurm.
    """
    found = re.fullmatch(sbatch.SIZE, str(size))
    if not found:
        raise ValueError(f"{size!r} is not a size of Slurm: a number and K, M, G or T")
    return int(found[1]) * _UNITS[found[2].upper()] or None


def available_bytes(job: Job, here: int | None) -> tuple[int | None, str | None]:
    """What the ranks of a node may use, and whose word that is: the least of what is known.

    Args:
        here: memory of this machine, where the ranks run on it.
    """
    known = []
    if job.cluster.memory_bytes:
        known.append((job.cluster.memory_bytes, f"cluster {job.cluster.name} (memory_bytes)"))
    asked = job.sbatch_options.get("mem") if job.cluster.launcher_traits.batch else None
    if asked is not None and not isinstance(asked, bool) and (size := slurm_bytes(asked)):
        known.append((size, f"the Slurm job (mem = {asked})"))
    pods = job.cluster.kubernetes if job.cluster.launcher_traits.pods else None
    if pods and (size := int(quantity(pods.resources.get("memory")) or 0)):
        known.append((size, f"the pod (resources.memory = {pods.resources['memory']})"))
    if here:
        known.append((here, "this machine"))
    return min(known, default=(None, None))


def _of_rank(job: Job, rules: Rules, memory: Memory, stage: int) -> int:
    """Bytes of the host's memory that a rank of a stage takes."""
    rank = memory.stages[stage]
    if job.cluster.device_type == "cpu":
        return rank.total_bytes
    return RANK_BYTES + copies_of_state(job, rules) * (rank.parameter_bytes + rank.optimizer_bytes)


def host_memory_of(
    job: Job, layout: Layout, rules: Rules, memory: Memory, here: int | None = None
) -> HostMemory:
    """The node whose ranks need most. Ranks lie as `trainkit.jobs.ranks.rank_at` says: a stage's
    are neighbours.

    Args:
        memory: of every stage.
        here: memory of this machine, where the ranks run on it.
    """
    each = [_of_rank(job, rules, memory, stage) for stage in range(layout.pipeline)]
    stage_ranks = layout.data_context * layout.tensor
    node_ranks = layout.ranks_per_node
    most = 0
    fullest = 0
    for node in range(-(-layout.world // node_ranks)):
        first = node * node_ranks
        last = min(first + node_ranks, stage_ranks * layout.pipeline)
        needed = 0
        for stage in range(first // stage_ranks, layout.pipeline):
            inside = min(last, (stage + 1) * stage_ranks) - max(first, stage * stage_ranks)
            if inside <= 0:
                break
            needed += inside * each[stage]
        if needed > most:
            most = needed
            fullest = node
    room, source = available_bytes(job, here)
    return HostMemory(fullest, most, room, source)
