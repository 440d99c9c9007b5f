"""On PYTHONPATH of an unmodified torchtitan 0.3.0 under torch 2.13 it trains on CPUs over gloo.

torch says that the CPU is its only kind of device, torch.cpu answers what torch.cuda is asked, and
what 0.3.0 uses of a newer torch is there in few lines.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


def patch(torch: Any) -> None:
    """Change torch as it has just been imported."""
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.pipelining import schedules
    from torch.nn.attention import flex_attention

    torch._utils._get_available_device_type = lambda: "cpu"
    memory = types.SimpleNamespace(total_memory=2**34, name="cpu")
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: memory
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None
    # without a compiler the operation is written out, and has a backward
    flex_attention._validate_device = lambda *_: None
    if not hasattr(dist, "set_timeout"):
        later = dist.distributed_c10d._set_pg_timeout
        setattr(dist, "set_timeout", lambda time, group=None: later(time, group))  # noqa: B010
    factors = collectives._get_gradient_divide_factors

    def added(*given: Any, **named: Any) -> Any:
        """Gloo multiplies nothing before it adds."""
        return factors(*given[:5], **{**named, "force_sum_reduction_for_comms": True})

    collectives._get_gradient_divide_factors = added
    whole_batch = schedules.PipelineScheduleSingle.step

    def step(self: Any, *args: Any, kwarg_mbs: Any = None, **named: Any) -> Any:
        """Of a newer torch: it takes micro-batches as well."""
        if kwarg_mbs is None:
            return whole_batch(self, *args, **named)
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        named.pop("target", None)  # `eval` says both
        args_split = named.pop("arg_mbs") or [()] * len(kwarg_mbs)
        return self._step_microbatches(args_split, kwarg_mbs, named.pop("target_mbs"), **named)

    schedules.PipelineScheduleSingle.step = step  # type: ignore[method-assign]


class Patched(importlib.abc.MetaPathFinder):
    """Finds torch once, and changes it behind its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patched())
