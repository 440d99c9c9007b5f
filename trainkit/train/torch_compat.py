"""The private and the moving names of torch that the trainer leans on, in one place. Works with
2.11 to 2.15."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

# registers the operations below and their gradients
import torch.distributed._functional_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.jobs.models import varlen_fits


def seed_generators(seed: int) -> None:
    """torch.manual_seed for the host and for the GPUs in use. Of accelerators that are not in use
    torch's own keeps every call for later, with the stack it came from: some milliseconds and
    kilobytes each."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def local_part(tensor: Tensor) -> Tensor:
    """The elements this rank holds, sharing storage: the local shard of a DTensor, else the
    tensor itself."""
    if isinstance(tensor, DTensor):
        # 0.5 us; detach().to_local() takes 13, and a step asks for three of every parameter
        tensor = tensor._local_tensor
    return tensor.detach()


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where `local_part` lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, a tensor over what this rank holds of `parameter`, as a tensor of the parameter's
    global shape, sharing storage."""
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    placements = parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


Outlined = TypeVar("Outlined", bound=Tensor)


def outline(kind: type[Outlined], shape: tuple[int, ...], dtype: torch.dtype) -> Outlined:
    """A tensor of a subclass that has a shape and a dtype, and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=torch.device("cpu"))


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Let this process find `group` by `name` too. The name of a group is a constant in compiled
    graphs, and torch's own differs from rank to rank."""
    from torch._C import _distributed_c10d as c10d

    with contextlib.suppress(RuntimeError):  # there is none of that name
        c10d._unregister_process_group(cast(Any, name))
    c10d._register_process_group(cast(Any, name), group)


def gathered(x: Tensor, size: int, group: str) -> Tensor:
    """What the ranks of a group hold, one after another along the first dimension; the gradient
    is `scattered`'s. torch's public functions return a subclass of Tensor that finishes when it
    is used, which leaks into what follows; these operations return plain tensors."""
    ops = torch.ops._c10d_functional
    return cast(Tensor, ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), size, group)))


def scattered(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part, along the first dimension, of the sum over a group; the gradient is
    `gathered`'s."""
    ops = torch.ops._c10d_functional
    return cast(
        Tensor, ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
    )


def summed(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    """The sum (or "max") over a group; the gradient is the sum of the gradients."""
    ops = torch.ops._c10d_functional
    return cast(Tensor, ops.wait_tensor(ops.all_reduce(x.contiguous(), operation, group)))


def begin_exchange(x: Tensor, taken: list[int], sent: list[int], group: str) -> Tensor:
    """As `exchanged`, without a gradient: what comes may be read after `finish_exchange`, and `x`
    must stay as it is until then."""
    ops = torch.ops._c10d_functional
    return cast(Tensor, ops.all_to_all_single(x.contiguous(), taken, sent, group))


def finish_exchange(coming: Tensor) -> Tensor:
    """Wait for what `begin_exchange` returned."""
    return cast(Tensor, torch.ops._c10d_functional.wait_tensor(coming))


class _Exchange(torch.autograd.Function):
    """As `exchanged`; 2.11's own operation has its gradient in another place than 2.13's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: list[int], sent: list[int], group: str) -> Tensor:
        ctx.words = (sent, taken, group)
        return finish_exchange(begin_exchange(x, taken, sent, group))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.forward(ctx, upstream[0], *ctx.words), None, None, None


def exchanged(x: Tensor, taken: list[int], sent: list[int], group: str) -> Tensor:
    """Rows from all ranks of a group, `taken` from each, for this one's, `sent` to each; the
    gradient goes the other way."""
    return cast(Tensor, _Exchange.apply(x, taken, sent, group))  # type: ignore[no-untyped-call]


def placed_apart(parameters: frozenset[nn.Parameter], mesh: DeviceMesh) -> Callable[..., Any]:
    """What fully_shard asks where each parameter goes: these are sharded over `mesh`, the first
    dimension of two over copies, and all others over its own. torch 2.13 has it, 2.11 not."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    apart = _fsdp_common.ShardPlacementResult(None, _mesh_info(mesh))

    def place(parameter: nn.Parameter) -> Any:
        return apart if parameter in parameters else None

    return place


def _mesh_info(mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def widen_gradients(module: nn.Module) -> None:
    """Add what backward left in `.grad` of fully_shard's units to their sums in `reduce_dtype`,
    as they do themselves when the gradient of what a unit was given is made: for a backward that
    makes those of its weights later. From 2.15 on `.grad` itself is in `reduce_dtype`."""
    if not hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed"):
        return
    for unit in module.modules():
        for group in _groups(unit) if isinstance(unit, FSDPModule) else ():
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()  # the first: there is no sum yet


def _groups(unit: FSDPModule) -> Iterable[Any]:
    """What a unit of fully_shard gathers and reduces at once; one before there were several."""
    state: Any = unit._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return cast(Iterable[Any], several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def forget_forward(stage: Any, chunk: int) -> None:
    """Let a pipeline's stage let go of what its forward of a micro-batch kept for a backward that
    does not come."""
    kept = getattr(stage, "_forward_chunk_states", None)  # fwd_cache before 2.15
    (stage.fwd_cache if kept is None else kept).pop(chunk, None)


def group_operations() -> list[object]:
    """The operations of `scattered`, `summed` and `exchanged`."""
    ops = torch.ops._c10d_functional
    return [
        ops.reduce_scatter_tensor.default,
        ops.all_reduce.default,
        ops.all_to_all_single.default,
    ]


def scale_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one number, shape (), in few kernels and without waiting for the
    device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def causal_varlen_attention(
    q_NAD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    bounds_D: Tensor,
    longest: int,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Causal attention within the documents between `bounds_D` (int32, CUDA), over a window of so
    many tokens or (0) all: torch's variable-length kernel, which knows grouped queries after 2.11
    only."""
    from torch.nn.attention.varlen import varlen_attn

    # tokens to the left and to the right of a query, itself not counted; -1: all
    keywords: dict[str, object] = {"window_size": (window - 1, 0), "scale": scale}
    if k_NGD.shape[1] != q_NAD.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            keywords["enable_gqa"] = True
        else:
            k_NGD, v_NGD = (
                t.repeat_interleave(q_NAD.shape[1] // t.shape[1], dim=1) for t in (k_NGD, v_NGD)
            )
    bounds = (bounds_D, bounds_D, longest, longest)
    return cast(Tensor, varlen_attn(q_NAD, k_NGD, v_NGD, *bounds, **keywords))  # type: ignore[arg-type]


def has_flash(q: Tensor) -> bool:
    """Whether `flash_attention` takes such queries: on CPUs all, on GPUs 16 bits and heads of a
    multiple of 8 channels up to 256."""
    return not q.is_cuda or (q.itemsize == 2 and varlen_fits(q.shape[-1]))


def flash_attention(
    q_BAQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v and logsumexp of the scores, (B, A, Q), in fp32 or wider; without
    gradients, `flash_attention_backward` has them. `causal`: query i sees the keys up to i."""
    aten = torch.ops.aten
    q_BAQD, k_BGKD, v_BGKD = (x.contiguous() for x in (q_BAQD, k_BGKD, v_BGKD))
    if q_BAQD.is_cuda:
        found = aten._scaled_dot_product_flash_attention(
            q_BAQD, k_BGKD, v_BGKD, 0.0, causal, False, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BAQD, k_BGKD, v_BGKD, 0.0, causal, scale=scale
        )
    return found[0], found[1]


def flash_attention_backward(
    dy_BAQD: Tensor,
    q_BAQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    y_BAQD: Tensor,
    logsum_BAQ: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `y` and `logsum` may be of more keys than these:
    then they are these keys' part."""
    aten = torch.ops.aten
    given = (dy_BAQD, q_BAQD, k_BGKD, v_BGKD, y_BAQD, logsum_BAQ)
    dy, q, k, v, y, logsum = (x.contiguous() for x in given)
    if q.is_cuda:
        none = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is drawn
        lengths = (None, None, q.shape[2], k.shape[2])
        found = aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, logsum, *lengths, 0.0, causal, none, none, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, logsum, 0.0, causal, scale=scale
        )
    return found[0], found[1], found[2]


def varlen_operations() -> list[object]:
    """The operations of `causal_varlen_attention`."""
    import torch.nn.attention.varlen  # registers them

    return [torch.ops.torch_attn._varlen_attn.default]


def be_deterministic() -> None:
    """Let this process take only kernels that give the same bits every time; an operation that
    has none raises RuntimeError (torch's notes, Reproducibility).

    cuBLAS asks for CUBLAS_WORKSPACE_CONFIG besides, which is set where the rank's environment is
    made. torch would fill new memory with NaN too, which only finds mistakes.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
