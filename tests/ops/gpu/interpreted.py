"""Triton's interpreter, metered: kernels run on the CPU, and every byte they load and store is
counted. Import this before any kernel, in a process of its own: triton decides at its import."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

Addresses = NDArray[np.uint64]


def _scalars_count_loops() -> None:
    """numpy >= 2.4 makes no int of an array of one element, which triton 3.6's scalars are."""
    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _rounds_as_a_gpu() -> None:
    """To the nearest bf16, ties to even; the interpreter cuts."""
    before = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != interpreter.tl.float32 or target != interpreter.tl.bfloat16:
            return before(data, source, target, rounding)
        bits = data.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = converted


_scalars_count_loops()
_rounds_as_a_gpu()


@dataclass
class Meter:
    """What kernels moved.

    Args:
        loads, stores: of every access, the addresses of its elements and their bytes.
    """

    loads: list[tuple[Addresses, int]] = field(default_factory=list)
    stores: list[tuple[Addresses, int]] = field(default_factory=list)

    def once(self) -> int:
        """Bytes where each address counts once as read and once as written: what memory sees if
        a cache keeps what is read again."""
        return sum(
            len(np.unique(np.concatenate([a for a, size in kind if size == wanted]))) * wanted
            for kind in (self.loads, self.stores)
            for wanted in {size for _, size in kind}
        )

    def asked(self) -> int:
        """Bytes of all accesses."""
        return sum(len(a) * size for a, size in (*self.loads, *self.stores))

    def loads_of(self, tensor: torch.Tensor) -> int:
        """Bytes of all loads inside of this tensor's memory."""
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        return sum(int(((a >= start) & (a < end)).sum()) * size for a, size in self.loads)


@contextmanager
def metered() -> Iterator[Meter]:
    """Counts what the interpreter's kernels move inside of it."""
    meter = Meter()
    builder = interpreter.interpreter_builder
    load = builder.create_masked_load
    store = builder.create_masked_store

    def counting_load(ptrs: Any, mask: Any, *others: Any) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        meter.loads.append((ptrs.data[mask.data].reshape(-1), size))
        return load(ptrs, mask, *others)

    def counting_store(ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        meter.stores.append((ptrs.data[mask.data].reshape(-1), size))
        return store(ptrs, value, mask, *others)

    builder.create_masked_load = counting_load
    builder.create_masked_store = counting_store
    try:
        yield meter
    finally:
        del builder.create_masked_load, builder.create_masked_store
