"""What accelerators can do: the peaks that MFU is measured against. Figures are the makers' data sheets, dense, without sparsity."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One row of the device table.

    Args:
        label: what people call it.
        reported_as: ends of the names that torch.cuda.get_device_name gives it.
        memory_bytes: its memory.
        peak_tflops: matmul TFLOP/s by precision.
        memory_gb_per_second: memory bandwidth, 1e9 bytes a second.
    """

    label: str
    reported_as: tuple[str, ...]
    memory_bytes: int
    peak_tflops: dict[str, float]
    memory_gb_per_second: float


GIB = 2**30
DEVICES: dict[str, Device] = {
    "v100-sxm-16gb": Device("V100 SXM2 16 GB", ("V100-SXM2-16GB",), 16 * GIB, {"fp16": 125.0, "fp32": 15.7}, 900),
    "v100-sxm-32gb": Device("V100 SXM2 32 GB", ("V100-SXM2-32GB",), 32 * GIB, {"fp16": 125.0, "fp32": 15.7}, 900),
    "a100-sxm-40gb": Device("A100 SXM4 40 GB", ("A100-SXM4-40GB",), 40 * GIB, {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}, 1555),
    "a100-sxm-80gb": Device("A100 SXM4 80 GB", ("A100-SXM4-80GB",), 80 * GIB, {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}, 2039),
    "h100-sxm-80gb": Device("H100 SXM5 80 GB", ("H100 80GB HBM3",), 80 * GIB, {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9}, 3350),
    "h200-sxm-141gb": Device("H200 SXM 141 GB", ("H200",), 141 * 10**9, {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9}, 4800),
    "b200-sxm-192gb": Device("B200 SXM 192 GB", ("B200",), 192 * 10**9, {"bf16": 2250.0, "fp16": 2250.0, "fp32": 80.0}, 8000),
    "a6000-48gb": Device("RTX A6000 48 GB", ("RTX A6000",), 48 * GIB, {"bf16": 154.8, "fp16": 154.8, "fp32": 38.7}, 768),
    "l40s-48gb": Device("L40S 48 GB", ("L40S",), 48 * GIB, {"bf16": 362.05, "fp16": 362.05, "fp32": 91.6}, 864),
}


def reported_device(name: str) -> Device | None:
    """The row of a device by the name torch gives it; None for one that is not in the table, never a guess.

    The whole end of a name must agree: a GH200 or an H200 NVL is no H200, a slice of a GPU (MIG) has not its peak.
    """
    return next((row for row in DEVICES.values() if any(re.search(rf"(?:^|\s){re.escape(end)}$", name) for end in row.reported_as)), None)
