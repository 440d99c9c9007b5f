"""Compiles for a GPU that is not there: launches are turned into compilations, with exactly what a
launch would specialize on, and the machine code is read."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
THREADS = 2048  # of a multiprocessor, in every target here
REGISTERS = 65536


@dataclass(frozen=True)
class Compiled:
    """What a launch would run.

    Args:
        name: of the kernel.
        warps: of a program.
        registers: a thread.
        spilled: bytes of local memory and of the stack, a thread.
        shared: bytes a program.
        widths: bits of every global access in the PTX.
    """

    name: str
    warps: int
    registers: int
    spilled: int
    shared: int
    widths: tuple[int, ...]

    @property
    def part_in_16_bytes(self) -> float:
        """Part of the bytes of all accesses, each counted once, that moves 16 bytes a thread."""
        return 128 * self.widths.count(128) / sum(self.widths)

    @property
    def occupancy(self) -> float:
        """Part of a multiprocessor's threads that can be resident, as registers have it."""
        threads = 32 * self.warps
        given = -(-self.registers // 8) * 8  # registers are handed out by eights
        return REGISTERS // (given * threads) * threads / THREADS


class _Absent:
    """A driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # triton keeps what it compiled by the device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Inside of it a launch compiles; the list has what was compiled."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_read(self.__name__, kernel))
        return kernel

    before = driver._active
    driver.set_active(_Absent(capability))
    JITFunction.run = compiled
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


def _read(name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        argv = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said)}
    return Compiled(
        name,
        kernel.metadata.num_warps,
        used["REG"],
        used["STACK"] + used["LOCAL"],
        kernel.metadata.shared,
        tuple(_widths(kernel.asm["ptx"])),
    )


def _widths(ptx: str) -> Iterator[int]:
    for line in ptx.splitlines():
        found = re.search(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[busf](\d+)\b", line)
        if found:
            yield int(found[1] or 1) * int(found[2])
        elif found := re.search(r"cp\.async\.c[ag]\.shared\.global.*\], (?:0x)?(\w+)", line):
            yield 8 * int(found[1], 16)
