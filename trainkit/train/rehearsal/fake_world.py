"""A process group in which nobody else is, and tensors that have no memory: the private parts of
torch that a rehearsal leans on.

Tensors are on torch's `meta` device, which knows shapes and dtypes only: operations run in C++
without touching a number. (FakeTensorMode does the same in Python, ten times as slowly.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# registers what c10d's operations return for tensors on meta
import torch.distributed._tools.fake_collectives
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.train.parallel.data_parallel import World

META = torch.device("meta")


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """This process as one rank of a world: groups of any ranks can be made, whatever is sent is
    lost, and what would arrive has no value."""
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with _sharding_on_meta():
            yield World(rank, size)
    finally:
        dist.destroy_process_group()


@contextmanager
def _sharding_on_meta() -> Iterator[None]:
    """fully_shard asks a device for its streams, and refuses parameters without memory: here it
    gets those of the CPU, and takes them."""
    group = _fsdp_param_group.FSDPParamGroup
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(_fully_shard, "_get_device_from_mesh", lambda mesh: META)
        for module in (_fsdp_param_group, _fsdp_state, _fsdp_collectives):
            put(module, "_get_device_handle", lambda kind: torch.cpu)
        put(group, "_validate_no_meta_params", lambda self: None)
        yield
