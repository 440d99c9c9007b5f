"""How kernels are laid over rows: which part of a matrix a program holds, and how many programs
there are.

All kernels here are bound by memory, so one rule serves them: a thread holds so few elements that
at least half of a multiprocessor's threads can be resident (64 registers a thread), and rows that
are contiguous are read 16 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WHOLE = 16384  # the widest row that a program keeps in registers: 1024 threads of 16 elements
MOST_WARPS = 32
REGISTERS = 64  # a thread has: half of a multiprocessor's threads can be resident
THREADS = 1024  # of one multiprocessor that are counted on: half of them
WITHOUT_A_GPU = 2  # multiprocessors where there are none: the interpreter's


@dataclass(frozen=True)
class Tile:
    """What one program holds at once.

    Args:
        rows: of the matrix, a power of two.
        columns: a power of two; wider rows are walked through.
        warps: of the program.
    """

    rows: int
    columns: int
    warps: int


def tile(width: int, elements: int, per_thread: int = 16) -> Tile:
    """Whole rows where they fit.

    Args:
        width: of a row.
        elements: what a program should hold; more where one row is longer, up to WHOLE.
        per_thread: elements of a thread.
    """
    columns = min(triton.next_power_of_2(max(width, 1)), WHOLE)
    rows = max(1, elements // columns)
    warps = min(MOST_WARPS, max(1, rows * columns // (32 * per_thread)))
    return Tile(rows, columns, warps)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of this GPU."""
    if device.type != "cuda":
        return WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def resident(device: torch.device, warps: int, work: int) -> int:
    """Programs that run side by side, at most `work`, at least one. The same on every run on the
    same GPU, so that sums of their parts are too.

    Args:
        device: where they run.
        warps: of one.
        work: pieces there are.
    """
    return max(1, min(work, multiprocessors(device) * max(1, THREADS // (32 * warps))))


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix of its last dimension, whose rows are contiguous: a view where strides allow
    it, else a copy."""
    matrix = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        return matrix.contiguous()
    return matrix


def wide_of(dtype: torch.dtype) -> tl.dtype:
    """What is computed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
