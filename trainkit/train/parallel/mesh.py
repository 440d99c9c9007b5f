"""The ranks as a mesh: who this one is on each axis, and the groups it talks in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.jobs.ranks import ParallelDegrees, RankCoordinates, coordinates_of, rank_at
from trainkit.train.parallel.context_group import CONTEXT, ContextGroup
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.expert_parallel import EXPERT, ExpertGroup
from trainkit.train.parallel.tensor_group import TENSOR, TensorGroup
from trainkit.train.torch_compat import name_group


@dataclass(frozen=True)
class ExpertMesh:
    """This rank in the grid of experts, which lies over the ranks of a stage.

    Args:
        data: the ranks that hold the same experts, one-dimensional, or two (replicate, shard).
        group: those that hold all experts together.
        copy_group: those that hold one copy of all experts together; None where this one does.
    """

    data: DeviceMesh
    group: ExpertGroup
    copy_group: dist.ProcessGroup | None

    @classmethod
    def of(cls, degrees: ParallelDegrees, rank: int, device: torch.device) -> ExpertMesh:
        """Make its groups; called by all ranks together."""
        replicate, shard = degrees.expert_copies
        sizes = {
            "pp": degrees.pipeline,
            "edp_replicate": replicate,
            "edp_shard": shard,
            "ep": degrees.expert_ranks,
        }
        whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if degrees.expert_ranks > 1:
            name_group(EXPERT, whole.get_group("ep"))
        together = shard * degrees.expert_ranks
        copy_group: dist.ProcessGroup | None = None
        for first in range(0, degrees.world if together > 1 else 0, together):
            group = dist.new_group(list(range(first, first + together)))  # all ranks make all
            if first <= rank < first + together:
                copy_group = group
        return cls(
            whole["edp_replicate", "edp_shard"] if replicate > 1 else whole["edp_shard"],
            ExpertGroup(degrees.expert, degrees.expert_tensor, rank % degrees.expert_ranks),
            copy_group,
        )


@dataclass(frozen=True)
class Mesh:
    """This rank among all.

    Args:
        degrees: sizes of the axes.
        place: where this rank stands.
        device: this rank's device.
        data: the ranks that hold the same weights together, data- and context-parallel ones,
            one-dimensional, or two (replicate, shard).
        tensor: the tensor-parallel group.
        context: the context-parallel group.
        pipeline_group: the stages of one model; None where there is one stage.
        tied_group: first and last stage of one model, on these two only; None elsewhere and where
            they are one rank.
        experts: this rank in the grid of experts; None: there are none, or they lie as all other
            weights do.
    """

    degrees: ParallelDegrees
    place: RankCoordinates
    device: torch.device
    data: DeviceMesh
    tensor: TensorGroup
    context: ContextGroup
    tensor_group: dist.ProcessGroup | None
    pipeline_group: dist.ProcessGroup | None
    tied_group: dist.ProcessGroup | None
    experts: ExpertMesh | None = None

    @property
    def data_world(self) -> World:
        """This rank among the data-parallel ones: whose samples it reads."""
        return World(self.place.data(self.degrees), self.degrees.data)

    @classmethod
    def of(
        cls,
        degrees: ParallelDegrees,
        world: World,
        device: torch.device,
        *,
        sequence: bool = False,
        tied_at: int | None = None,
        experts: bool = False,
    ) -> Mesh:
        """Make all groups; called by all ranks together, after `data_parallel.join`.

        Args:
            sequence: of the tensor-parallel group; means nothing for one rank.
            tied_at: the stage beside the first that holds tied weights; None: no other.
            experts: the model has some.
        """
        sizes = {
            "pp": degrees.pipeline,
            "dp_replicate": degrees.replicate,
            "dp_shard": degrees.shard,
            "tp": degrees.tensor,
        }
        whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        place = coordinates_of(world.rank, degrees)
        tensor_group = whole.get_group("tp") if degrees.tensor > 1 else None
        if tensor_group is not None:
            name_group(TENSOR, tensor_group)
        tied_group = None
        for among in range(degrees.data_context) if tied_at else ():
            for tensor in range(degrees.tensor):
                ends = [
                    rank_at(RankCoordinates(stage, *divmod(among, degrees.shard), tensor), degrees)
                    for stage in (0, tied_at or 0)
                ]
                group = dist.new_group(ends)  # all ranks make all groups
                if world.rank in ends:
                    tied_group = group
        if degrees.context > 1:
            _name_context_group(degrees, world.rank)
        apart = degrees.tensor * degrees.expert_ranks > 1
        return cls(
            degrees=degrees,
            place=place,
            device=device,
            data=whole["dp_replicate", "dp_shard"] if degrees.replicate > 1 else whole["dp_shard"],
            tensor=TensorGroup(degrees.tensor, place.tensor, sequence and degrees.tensor > 1),
            tensor_group=tensor_group,
            pipeline_group=whole.get_group("pp") if degrees.pipeline > 1 else None,
            tied_group=tied_group,
            experts=ExpertMesh.of(degrees, world.rank, device) if experts and apart else None,
            context=ContextGroup(degrees.context, place.context(degrees)),
        )

    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one copy of this stage's layers together; None where this one does.
        A new group, which all ranks make together."""
        d = self.degrees
        if d.shard * d.tensor == 1:
            return None
        own: dist.ProcessGroup | None = None
        for stage in range(d.pipeline):
            for copy in range(d.replicate):
                ranks = [
                    rank_at(RankCoordinates(stage, copy, shard, tensor), d)
                    for shard in range(d.shard)
                    for tensor in range(d.tensor)
                ]
                group = dist.new_group(ranks)
                if (stage, copy) == (self.place.pipeline, self.place.replicate):
                    own = group
        return own


def _name_context_group(degrees: ParallelDegrees, rank: int) -> None:
    """Make the groups of ranks that read the same samples, and name this rank's."""
    block = degrees.context * degrees.tensor
    for first in range(0, degrees.world, block):
        for tensor in range(degrees.tensor):
            ranks = list(range(first + tensor, first + block, degrees.tensor))
            group = dist.new_group(ranks)  # all ranks make all groups
            if rank in ranks:
                name_group(CONTEXT, group)
