"""What several ranks hold alike: gradients are added up over the copies, and counted once in their norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.train import optimizer
from trainkit.train.mesh import Mesh
from trainkit.train.shards import Held
from trainkit.train.torch_compat import local_part

TIED = "embed_tokens.weight"


@torch.no_grad()
def add_up(held: Mapping[str, Held], mesh: Mesh) -> None:
    """Add gradients up that lie on several ranks in parts: over a tensor-parallel group those of weights that some or all of its ranks hold alike, in one
    collective, and those of tied weights over first and last stage."""
    if mesh.tensor_group is not None:
        _over_tensor_ranks(held, mesh)
    _over_tied(held, mesh)


def _over_tied(held: Mapping[str, Held], mesh: Mesh) -> None:
    copies = [local_part(h.parameter.grad) for h in held.values() if h.name == TIED and h.parameter.grad is not None]
    if mesh.tied_group is not None:
        for gradient in copies:
            dist.all_reduce(gradient, group=mesh.tied_group)
    elif len(copies) == 2:  # both on this rank
        copies[0].add_(copies[1])
        copies[1].copy_(copies[0])


def _over_tensor_ranks(held: Mapping[str, Held], mesh: Mesh) -> None:
    size, rank = mesh.tensor.size, mesh.tensor.rank
    views: list[Tensor] = []  # alike on `alike[i]` neighbouring ranks
    alike: list[int] = []
    for h in held.values():
        if h.parameter.grad is not None:
            local = local_part(h.parameter.grad)
            shared = [cut for cut in h.cuts if cut.replicas > 1]
            views += [cut.of(local) for cut in shared]
            alike += [cut.replicas for cut in shared]
    if not views:
        return
    # Each set of ranks that hold the same has its own place; all places are added up together, so that no further groups are needed.
    wide = torch.float64 if mesh.device.type == "cpu" else torch.float32
    places = [view.new_zeros((size // count, view.numel()), dtype=wide) for view, count in zip(views, alike, strict=True)]
    for view, count, place in zip(views, alike, places, strict=True):
        place[rank // count] = view.flatten()
    flat = torch.cat([place.flatten() for place in places])
    dist.all_reduce(flat, group=mesh.tensor_group)
    for view, count, place in zip(views, alike, torch.split(flat, [place.numel() for place in places]), strict=True):
        view.copy_(place.view(size // count, -1)[rank // count].view_as(view))


def squared_norm(held: Mapping[str, Held], mesh: Mesh) -> Tensor:
    """This rank's part of the squared gradient norm, shape (), in fp64: what n ranks hold alike counts 1 / n on each, the second copy of tied weights 0 times,
    which is NaN all the same where it is not finite."""
    by_weight: dict[float, list[Tensor]] = {}
    for h in held.values():
        if h.parameter.grad is None:
            continue
        local = local_part(h.parameter.grad)
        if mesh.degrees.tensor == 1:
            by_weight.setdefault(float(h.counts), []).append(local)
            continue
        for cut in h.cuts:
            by_weight.setdefault(h.counts / cut.replicas, []).append(cut.of(local))
    parts = [optimizer.squared_norm(gradients) * (weight / mesh.degrees.replicate) for weight, gradients in by_weight.items()]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=mesh.device)
