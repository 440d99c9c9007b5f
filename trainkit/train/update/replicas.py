"""What several ranks hold alike: gradients are added up over the copies, and counted once in
their norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.shards import ShardedParameter
from trainkit.train.torch_compat import local_part
from trainkit.train.update import optimizer

TIED = "embed_tokens.weight"


@torch.no_grad()
def add_up(parameters: Mapping[str, ShardedParameter], mesh: Mesh) -> None:
    """Add gradients up that lie on several ranks in parts: over a tensor-parallel group those of
    weights that some or all of its ranks hold alike, and those of tied weights over first and
    last stage."""
    if mesh.tensor_group is not None:
        _over_tensor_ranks(parameters, mesh)
    _over_tied(parameters, mesh)


def _over_tied(parameters: Mapping[str, ShardedParameter], mesh: Mesh) -> None:
    copies = [
        local_part(h.parameter.grad)
        for h in parameters.values()
        if h.name == TIED and h.parameter.grad is not None
    ]
    if mesh.tied_group is not None:
        for gradient in copies:
            dist.all_reduce(gradient, group=mesh.tied_group)
    elif len(copies) == 2:  # both on this rank
        copies[0].add_(copies[1])
        copies[1].copy_(copies[0])


def _over_tensor_ranks(parameters: Mapping[str, ShardedParameter], mesh: Mesh) -> None:
    """Add up what `count` neighbouring ranks hold alike. Every rank adds up its part of that in
    the order of ranks, rounds it once and gives it to the others: two exchanges, each of (count
    - 1) / count of the elements, the minimum; and no group is needed but the
    tensor-parallel one."""
    views: dict[int, list[Tensor]] = {}
    for h in parameters.values():
        if h.parameter.grad is not None:
            local = local_part(h.parameter.grad)
            for box in h.boxes:
                if box.replicas > 1:
                    views.setdefault(box.replicas, []).append(box.of(local))
    if not views:
        return
    wide = torch.float64 if mesh.device.type == "cpu" else torch.float32
    counts = sorted(views)  # on every rank alike
    parts = {
        count: _in_parts(torch.cat([view.flatten() for view in views[count]]), count)
        for count in counts
    }
    found = _exchanged({count: list(parts[count]) for count in counts}, mesh)
    mine = {
        count: torch.stack(found[count]).to(wide).sum(0).to(parts[count].dtype) for count in counts
    }
    whole = _exchanged({count: [mine[count]] * count for count in counts}, mesh)
    for count in counts:
        flat = torch.cat(whole[count])
        start = 0
        for view in views[count]:
            view.copy_(flat[start : start + view.numel()].view_as(view))
            start += view.numel()


def _in_parts(flat: Tensor, count: int) -> Tensor:
    """(count, n): the elements in equal parts, the last filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % count)).view(count, -1)


def peers(rank: int, count: int) -> range:
    """The ranks of a tensor-parallel group that hold the same as this one."""
    first = rank // count * count
    return range(first, first + count)


def sent(rank: int, size: int, lengths: Mapping[int, int]) -> list[int]:
    """Elements that go from a rank to each of its group in one exchange, and come back from
    there. `lengths`: of a part, by the number of ranks that hold it alike."""
    return [
        sum(length for count, length in lengths.items() if other in peers(rank, count))
        for other in range(size)
    ]


def _exchanged(parts: Mapping[int, list[Tensor]], mesh: Mesh) -> dict[int, list[Tensor]]:
    """Give each peer its part, and take theirs: by the number of ranks that hold the same, in
    the order of ranks."""
    size = mesh.tensor.size
    rank = mesh.tensor.rank
    sizes = sent(rank, size, {count: len(of_count[0]) for count, of_count in parts.items()})
    to_each = [
        of_count[other - peers(rank, count).start]
        for other in range(size)
        for count, of_count in parts.items()
        if other in peers(rank, count)
    ]
    given = torch.cat(to_each)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, sizes, sizes, group=mesh.tensor_group)
    pieces = iter(torch.split(taken, [len(part) for part in to_each]))
    found: dict[int, list[Tensor]] = {count: [] for count in parts}
    for other in range(size):
        for count in parts:
            if other in peers(rank, count):
                found[count].append(next(pieces))
    return found


def squared_norm(
    parameters: Mapping[str, ShardedParameter], mesh: Mesh, kernels: Kernels = REFERENCE
) -> Tensor:
    """This rank's part of the squared gradient norm, shape (), in fp64: what n ranks hold alike
    counts 1 / n on each, the second copy of tied weights 0 times, which is NaN all the same
    where it is not finite."""
    by_weight: dict[float, list[Tensor]] = {}
    for h in parameters.values():
        if h.parameter.grad is None:
            continue
        local = local_part(h.parameter.grad)
        if mesh.degrees.tensor == 1:
            by_weight.setdefault(h.counts / h.copies, []).append(local)
            continue
        for box in h.boxes:
            weight = h.counts / (h.copies * box.replicas)
            by_weight.setdefault(weight, []).append(box.of(local))
    parts = [
        optimizer.squared_norm(gradients, kernels) * weight
        for weight, gradients in by_weight.items()
    ]
    if parts:
        return torch.stack(parts).sum()
    return torch.zeros((), dtype=torch.float64, device=mesh.device)
