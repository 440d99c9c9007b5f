"""Numbers and traffic of all kernels under Triton's interpreter. Run by test_triton_interpreted.py,
in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

# before the kernels, for triton decides at its import what `jit` makes
from tests.ops.gpu.interpreted import metered  # isort: skip
from tests.ops.gpu import kernel_cases
from trainkit.ops.triton_kernels import (
    activations,
    cross_entropy,
    norms,
    rotary,
    scaled_softmax,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WIDTHS = [(1, F32), (33, BF16), (64, F16), (64, F32)]


class Parts:
    """The sums over rows that one kernel leaves and another adds up: bytes beside the floor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        for module in (norms, activations, rotary):
            add_up = module.sum_columns

            def counting(parts: Tensor, dtype: torch.dtype, add_up=add_up) -> Tensor:  # type: ignore[no-untyped-def]
                self.bytes += 2 * parts.nbytes
                total: Tensor = add_up(parts, dtype)
                return total

            monkeypatch.setattr(module, "sum_columns", counting)


def check(
    cases: Iterator[kernel_cases.Case], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right numbers; memory is touched as often as it must be."""
    parts = Parts(monkeypatch)
    for case in cases:
        parts.bytes = 0
        with metered() as meter:
            found = kernel_cases.outputs(case)
        kernel_cases.check_numbers(case, dtype, found)
        assert meter.once() == case.moved + parts.bytes, case.name
        for tensor, times in case.streams:
            targets = meter.loads_of(tensor) - times * tensor.nbytes
            # the label's logit is looked up besides
            assert 0 <= targets <= 16 * tensor.itemsize, (case.name, targets)
            assert targets == 0 or "softmax" in case.name, (case.name, targets)


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_norms(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "FORWARD", 128)
    monkeypatch.setattr(norms, "BACKWARD", 128)
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.norm_cases(made, 11, width, (1, 1)), dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_of_rows_too_wide_for_registers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean, squares and result each read a row; so do the sums, the result and the weight's
    gradient of backward."""
    monkeypatch.setattr(norms, "WHOLE", 64)
    monkeypatch.setattr(norms, "WALK", 256)
    made = kernel_cases.inputs(dtype, "cpu")
    for case in kernel_cases.norm_cases(made, 3, 700, (0, 0)):
        forward_reads = 2 + ("layer" in case.name)
        reads = 3 if "backward" in case.name else forward_reads
        streams = tuple((tensor, reads) for tensor, _ in case.streams)
        check(iter([replace(case, streams=streams)]), dtype, monkeypatch)


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_activations(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "BYTES", 128)
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.activation_cases(made, 5, width), dtype, monkeypatch)


@pytest.mark.parametrize(
    ("size", "turning", "dtype"),
    [(16, 16, BF16), (12, 4, F16), (24, 6, F32), (2, 2, F32), (8, 0, BF16)],
)
def test_rotary(
    size: int, turning: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.rotary_cases(made, 3, size, turning), dtype, monkeypatch)


@pytest.mark.parametrize(
    ("vocab", "columns", "dtype"), [(61, 61, F16), (300, 304, BF16), (300, 304, F32), (1, 1, F32)]
)
def test_cross_entropy(
    vocab: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LANES", 16)
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.loss_cases(made, 6, vocab, columns), dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_optimizer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.optimizer_cases(made, (5, 4096, 40000, 1)), dtype, monkeypatch)


@pytest.mark.parametrize(("queries", "keys", "dtype"), [(5, 9, BF16), (4, 4, F16), (3, 2, F32)])
def test_scaled_softmax(
    queries: int, keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_softmax, "COLUMNS", 4)
    made = kernel_cases.inputs(dtype, "cpu")
    check(kernel_cases.softmax_cases(made, queries, keys), dtype, monkeypatch)
