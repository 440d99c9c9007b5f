"""What accelerators can do: the device table. Rows of jobs.toml, [devices.X], lie over these."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from trainkit.jobs.table import NAME, Strings, Table

Precision = Literal["fp32", "bf16", "fp16", "fp8"]


class Device(Table):
    """One kind of device. Figures are the makers' data sheets: dense, without sparsity; memory
    as the maker counts it, in GiB or 1e9 bytes."""

    planned = ("memory_gb_per_second", "link_gb_per_second")

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    kind: Literal["cpu", "cuda", "neuron"] = Field(
        "cuda", description="torch's name for it; neuron: AWS Trainium, for engines that run there"
    )
    label: str = Field("", description="what people call it")
    reported_as: Strings = Field(
        (), description="ends of the names that torch.cuda.get_device_name gives it"
    )
    memory_bytes: int | None = Field(
        None, ge=1, description="its memory; not given: unknown, and nothing is said of what fits"
    )
    peak_tflops: dict[Precision, float] = Field(
        default_factory=dict, description="matmul TFLOP/s by precision; not given: no MFU"
    )


GIB = 2**30
GB = 10**9


def _gpu(
    label: str,
    reported: str,
    memory: int,
    half: float,
    single: float,
    *,
    bf16: bool = True,
    fp8: float | None = None,
) -> dict[str, object]:
    peaks = {"fp16": half, "fp32": single} | ({"bf16": half} if bf16 else {})
    peaks |= {"fp8": fp8} if fp8 else {}
    return {
        "label": label,
        "reported_as": [reported],
        "memory_bytes": memory,
        "peak_tflops": peaks,
    }


# The rows that come with trainkit, as a jobs.toml would write them. cuda is any GPU: of it nothing
# is known before torch has named it.
BUILT_IN_DEVICES: dict[str, dict[str, object]] = {
    "cpu": {"kind": "cpu", "label": "CPU"},
    "cuda": {"label": "a CUDA GPU"},
    "v100-sxm-16gb": _gpu("V100 SXM2 16 GB", "V100-SXM2-16GB", 16 * GIB, 125.0, 15.7, bf16=False),
    "v100-sxm-32gb": _gpu("V100 SXM2 32 GB", "V100-SXM2-32GB", 32 * GIB, 125.0, 15.7, bf16=False),
    "a100-sxm-40gb": _gpu("A100 SXM4 40 GB", "A100-SXM4-40GB", 40 * GIB, 312.0, 19.5),
    "a100-sxm-80gb": _gpu("A100 SXM4 80 GB", "A100-SXM4-80GB", 80 * GIB, 312.0, 19.5),
    "h100-sxm-80gb": _gpu("H100 SXM5 80 GB", "H100 80GB HBM3", 80 * GIB, 989.4, 66.9, fp8=1978.9),
    "h200-sxm-141gb": _gpu("H200 SXM 141 GB", "H200", 141 * GB, 989.4, 66.9, fp8=1978.9),
    "b200-sxm-192gb": _gpu("B200 SXM 192 GB", "B200", 192 * GB, 2250.0, 80.0, fp8=4500.0),
    "a6000-48gb": _gpu("RTX A6000 48 GB", "RTX A6000", 48 * GIB, 154.8, 38.7),
    "l40s-48gb": _gpu("L40S 48 GB", "L40S", 48 * GIB, 362.05, 91.6, fp8=733.0),
    "trn1-core": {
        "kind": "neuron",
        "label": "one NeuronCore-v2 of trn1",
        "memory_bytes": 16 * GIB,
        "peak_tflops": {"bf16": 95.0, "fp16": 95.0, "fp32": 23.75},
    },
}


def built_in_device(name: str) -> Device:
    """A row that comes with trainkit. Raises KeyError for another."""
    return Device.model_validate({"name": name, **BUILT_IN_DEVICES[name]})


def reported_device(name: str) -> Device | None:
    """The row that comes with trainkit of a GPU by the name torch gives it; None for one that is
    not in the table, never a guess.

    The whole end of a name must agree: a GH200 or an H200 NVL is not an H200, a slice of a GPU
    (MIG) has not its peak.
    """
    return next(
        (row for row in map(built_in_device, BUILT_IN_DEVICES) if is_reported_as(row, name)), None
    )


def is_reported_as(device: Device, name: str) -> bool:
    """Whether torch's name of a GPU is that of this row."""
    return any(re.search(rf"(?:^|\s){re.escape(end)}$", name) for end in device.reported_as)
