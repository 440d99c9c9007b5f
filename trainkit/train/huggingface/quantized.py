"""Tensors as they are stored in published folders, packed ones too: which of them are read, and
their values in fp32, unpacked only as far as they are asked for.

FP8 (DeepSeek-V3, inference/README_WEIGHTS.md): `X` in e4m3 and `X_scale_inv`, a factor for each
block of 128 x 128, of which those at the edges are cut. MXFP4 (gpt-oss, gpt_oss/torch/weights.py;
OCP Microscaling Formats 1.0, section 5): `X_blocks`, bytes of two numbers, the first in the low
half, in blocks of 32 along the inputs, and `X_scales`, the exponent of each block plus 127.
Imports torch only where values are read: stages look at headers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, replace

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
FP8_SIDE = 128  # of a block with one scale
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [FP8_SIDE, FP8_SIDE],
    "activation_scheme": "dynamic",
}
MX_BYTES = 16  # of a block with one scale
MX_BLOCK = 2 * MX_BYTES
MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15: the negative


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, and its name there. With `scales` it is packed; `shape` is
    that of its values, as it would be in bf16."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: StoredTensor | None = None


def quantization(config: Mapping[str, Any]) -> str | None:
    """What a config.json says of packed weights: "fp8", "mxfp4", or None for none that is read."""
    there = config.get("quantization_config")
    if not isinstance(there, dict):
        return None
    if there.get("quant_method") == "mxfp4":
        return "mxfp4"
    optional = {"fmt", "activation_scheme"}  # transformers writes fmt no more
    for key, value in FP8_CONFIG.items():
        if there.get(key, value if key in optional else None) != value:
            return None
    return "fp8"


def quantization_problems(config: Mapping[str, Any]) -> list[Problem]:
    """That weights are packed otherwise than in the two ways that are read."""
    if not config.get("quantization_config") or quantization(config):
        return []
    return [
        Problem(
            "its weights are quantized (quantization_config) in another way than the two that are"
            f" read: {FP8_CONFIG}, and quant_method 'mxfp4'",
            hint="take the weights it was quantized from",
        )
    ]


def join_scales(tensors: dict[str, StoredTensor], method: str | None) -> list[Problem]:
    """Put packed tensors and their scales together, in place, under the names that they would have
    in bf16. What is not packed by `method` stays as it is.

    Args:
        tensors: of a folder, by the table's names.
        method: as of `quantization`.

    Returns:
        Which scales are missing or do not fit.
    """
    problems = []
    known = {stored.name: name for name, stored in tensors.items()}
    for name, stored in list(tensors.items()):
        shape = stored.shape
        ours = name.removesuffix("_blocks")
        if method == "fp8" and stored.dtype == FP8 and len(shape) == 2:
            of_scales = f"{stored.name}_scale_inv"
            blocks = tuple(-(-size // FP8_SIDE) for size in shape)
            dtypes: tuple[str, ...] = DTYPES
        elif method == "mxfp4" and ours not in tensors and shape[3:] == (MX_BYTES,):
            of_scales = f"{stored.name.removesuffix('_blocks')}_scales"
            blocks = shape[:3]
            dtypes = ("U8",)
            shape = (shape[0], shape[2] * MX_BLOCK, shape[1])
        else:
            continue
        scales = tensors.pop(known[of_scales], None) if of_scales in known else None
        if scales is None:
            found = "has no"
        elif scales.shape != blocks or scales.dtype not in dtypes:
            found = f"does not fit {scales.dtype} {list(scales.shape)} of"
        else:
            found = ""
        if found:
            problems.append(
                Problem(
                    f"{stored.name} {found} {of_scales}: its scales are {' or '.join(dtypes)}"
                    f" {list(blocks)}",
                    SourceLocation(str(stored.file)),
                    "fetch the folder again, or take the weights it was quantized from",
                )
            )
        del tensors[name]
        # where scales are missing, one problem says so: nothing is read then
        tensors[ours] = replace(stored, shape=shape, scales=scales or stored)
    return problems


def unpacked(
    stored: StoredTensor, at: tuple[slice, ...], part_of: Callable[[StoredTensor], Any]
) -> Tensor:
    """Values of a packed tensor, in fp32; in memory is what was asked for, up to whole blocks.

    Args:
        stored: it.
        at: which, in each dimension of `stored.shape`, without steps.
        part_of: opens a tensor for reading by slices.

    Raises:
        ConfigError: a value is not finite.
    """
    assert stored.scales is not None
    box = [range(*cut.indices(size)) for cut, size in zip(at, stored.shape, strict=True)]
    read = _fp8 if stored.dtype == FP8 else _mxfp4
    found = read(box, part_of(stored), part_of(stored.scales))
    # by parts: isfinite makes copies of what it looks at
    if not all(part.isfinite().all() for part in found.chunk(64, -1)):
        raise ConfigError(
            f"{stored.file}: {stored.name} by {stored.scales.name} of {stored.scales.file.name}"
            " has values that are not finite",
            hint="one of the two is damaged: fetch the folder again",
        )
    return found


def _blocks(part: range, size: int) -> slice:
    """Those that have a part of a dimension."""
    return slice(part.start // size, -(-part.stop // size))


def _fp8(box: list[range], codes: Any, scales: Any) -> Tensor:
    rows, columns = box
    found: Tensor = codes[rows.start : rows.stop, columns.start : columns.stop].float()
    blocks = _blocks(columns, FP8_SIDE)
    factors = scales[_blocks(rows, FP8_SIDE), blocks].float()
    skipped = columns.start - blocks.start * FP8_SIDE
    for i, of_row in enumerate(factors):
        first = (rows.start // FP8_SIDE + i) * FP8_SIDE - rows.start
        wide = of_row.repeat_interleave(FP8_SIDE)[skipped : skipped + len(columns)]
        found[max(first, 0) : first + FP8_SIDE] *= wide
    return found


def _mxfp4(box: list[range], codes: Any, scales: Any) -> Tensor:
    import torch

    experts, inputs, outputs = box
    blocks = _blocks(inputs, MX_BLOCK)
    at = (slice(experts.start, experts.stop), slice(outputs.start, outputs.stop), blocks)
    values = torch.tensor([sign * value for sign in (1, -1) for value in MX_VALUES])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # of each byte
    bytes_EOIB = codes[*at]
    found = pairs.index_select(0, bytes_EOIB.flatten().int()).view(*bytes_EOIB.shape[:3], MX_BLOCK)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    found *= powers[scales[*at].long()].unsqueeze(-1)
    skipped = inputs.start - blocks.start * MX_BLOCK
    return found.flatten(2)[..., skipped : skipped + len(inputs)].transpose(1, 2)
