"""Every operation has an implementation for CUDA devices, of the same parameters."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="GPU kernels need the extra [triton]")

from trainkit.ops import kernels, library

FOR_CPUS = "causal_attention"  # a GPU has torch's


def test_every_operation_has_one() -> None:
    from trainkit.ops.triton_kernels.register import IMPLEMENTATIONS

    assert kernels.choose("fused", "cuda").kernels is kernels.FUSED
    assert kernels.choose("auto", "cuda") == kernels.Choice(kernels.FUSED)
    own = {function.__name__: function for function in IMPLEMENTATIONS}
    prefix = f"{library.NAMESPACE}::"
    everything = torch._C._dispatch_get_all_op_names()
    declared = {
        name.removeprefix(prefix)
        for name in everything
        if name.startswith(prefix)
        # one implementation for all devices
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
    }
    assert {name for name in declared if not name.startswith(FOR_CPUS)} == set(own)
    for name, function in own.items():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(prefix + name, "CUDA"), name
        schema = getattr(torch.ops.trainkit, name).default._schema
        assert len(inspect.signature(function).parameters) == len(schema.arguments), name


def test_importing_operations_imports_no_kernel() -> None:
    code = "import sys, trainkit.ops.kernels; print(*sys.modules)"
    argv = [sys.executable, "-c", code]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "trainkit.ops.kernels" in said.split()
    assert not [name for name in said.split() if name.startswith("trainkit.ops.triton_kernels")]
