"""Rows of public timings (the columns of given.csv) as the time model takes them."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from trainkit.plan.time.constants import machine
from trainkit.plan.time.setup import Hardware, RankSplit, Setup, Shape

DEVICES = {
    "A100": "a100-80",
    "A100-80GB": "a100-80",
    "A100-40GB": "a100-40",
    "V100-32GB": "v100",
    "V100-16GB": "v100",
    "T4": "t4",
    **{name: name.lower() for name in ("H100", "H200", "B200", "B300", "GB200", "GB300", "GH200")},
}
BITS = {"fp16": 16, "bf16": 16, "mxfp8": 8, "nvfp4": 4}  # others: fp8 and its recipes
# Gb/s of a node, by words of `interconnect`; where none is there, the reference design's
NETWORKS = {
    "800 Gb/s a node": 800,
    "4 x Omni-Path 100": 400,
    "Omni-Path (Jean Zay)": 200,
    "1600 Gb/s a node": 1600,
    "4 x 100 Gb/s": 400,
    "50 Gb/s a node": 50,
    "400 Gb/s a node": 400,
    "8 x HDR 200": 1600,
    "400 Gb/s a GPU": 3200,
    "Ethernet": 50,
    "Slingshot 11": 800,
}
SOFTWARE = {  # by words of `source`
    "vTrain": "megatron-2021",
    "bigscience": "megatron-2021",
    "AMP": "megatron-2021",
    "Megatron-LM": "megatron-2021",
    "calculon": "megatron-2021",
    "seed 00": "megatron-2021",
    "sailor": "megatron-2021",
    "dgxc-benchmarking": "megatron",
    "Megatron-Bridge": "megatron",
    "NVIDIA/NeMo": "megatron",
    "mlcommons": "megatron",
    "ModelZoo": "megatron",
    "JAX": "jax",
    "llm-foundry": "fsdp",
    "InternEvo": "fsdp",
    "torchtitan": "fsdp",
    "fms-fsdp": "fsdp",
}


NEEDED = (
    "layers",
    "hidden",
    "seq",
    "gpus",
    "dp",
    "micro_batch",
    "global_batch",
    "seconds_per_iteration",
)


@dataclass(frozen=True)
class Row:
    """One measured layout."""

    id: str
    source: str
    group: tuple[str, str, str]
    cell: tuple[str, ...]
    seconds: float
    setup: Setup
    note: str


def software_of(source: str, model: str) -> str:
    """Which kind of trainer ran it."""
    if "paxml" in model or "maxtext" in model:
        return "jax"
    return next((kind for word, kind in SOFTWARE.items() if word in source), "megatron")


def _number(text: str, default: int) -> int:
    return int(float(text)) if text else default


def _shape(row: dict[str, str]) -> Shape:
    hidden = int(row["hidden"])
    heads = _number(row["heads"], max(1, hidden // 128))
    groups = _number(row["kv_heads"], heads)
    return Shape(
        layers=int(row["layers"]),
        hidden=hidden,
        query=hidden,
        key=hidden * groups // heads,
        heads=heads,
        ffn=_number(row["ffn"], 4 * hidden),
        projections=1 + (row["gated"] == "1"),
        seq=int(row["seq"]),
        vocab=_number(row["vocab"], 50304),
        experts=_number(row["experts"], 0),
        topk=_number(row["topk"], 1),
    )


def _split(row: dict[str, str], software: str) -> RankSplit:
    tensor, data = _number(row["tp"], 1), int(row["dp"])
    context = _number(row["cp"], 1)
    zero, shard = _zero(row, software, data * context)
    sequence = row["sp"] == "1" or (not row["sp"] and software == "megatron")
    return RankSplit(
        world=int(row["gpus"]),
        tensor=tensor,
        pipeline=_number(row["pp"], 1),
        virtual=_number(row["vpp"], 1),
        data=data,
        context=context,
        expert=_number(row["ep"], 1),
        zero=zero,
        shard=shard,
        sequence=sequence and tensor > 1,
        recompute=row["recompute"] or "none",
        micro_batch=max(1, int(float(row["micro_batch"]))),
        global_batch=int(float(row["global_batch"])),
    )


def _zero(row: dict[str, str], software: str, ranks: int) -> tuple[int, int]:
    """Stage, and ranks that state is split over."""
    word = row["zero"]
    if word == "fsdp":
        return 3, ranks
    if word == "hsdp":
        return 3, min(ranks, int(row["gpus_per_node"]))
    if "/" in word:
        return 1, min(ranks, int(word.partition("/")[2]))
    default = 1 if software == "megatron" else 0
    stage = int(word) if word.isdecimal() else default
    return stage, ranks if stage else 1


def device_of(gpu: str) -> str | None:
    """The row of hardware.toml of a GPU as tables name it, whatever follows the name (A100-PCIe,
    H100 80GB); None for one that is in no row."""
    known = [name for name in DEVICES if gpu == name or gpu.startswith((f"{name}-", f"{name} "))]
    return DEVICES[max(known, key=len)] if known else None


def _machine(row: dict[str, str]) -> Hardware | None:
    per_node = _number(row["gpus_per_node"], 8)
    speed = next((gb for word, gb in NETWORKS.items() if word in row["interconnect"]), None)
    network = speed / 8 * 1e9 if speed else None
    bits = BITS.get(row["precision"], 8)
    sockets = any(word in row["interconnect"] for word in ("Ethernet", "50 Gb/s a node"))
    name = device_of(row["gpu"])
    if name is None:
        return None
    return machine(name, bits=bits, per_node=per_node, network=network, sockets=sockets)


def read_rows(path: Path, *, clean: bool = True) -> list[Row]:
    """Rows of a file that can be predicted; those that its notes call unclean are left out."""
    rows = []
    left_out = 0
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if clean and not row["note"].startswith("clean"):
                continue
            source = row["source"].partition("@")[0].removesuffix(":")
            software = software_of(row["source"], row["model"])
            device = _machine(row)
            if device is None or not all(row[key] for key in NEEDED):
                left_out += 1
                continue
            keys = ("model", "gpu", "gpus", "global_batch", "seq", "precision", "interconnect")
            rows.append(
                Row(
                    id=row["id"],
                    source=source,
                    group=(row["model"], row["gpu"], source),
                    cell=(source, row["layers"], *(row[key] for key in keys)),
                    seconds=float(row["seconds_per_iteration"]),
                    setup=Setup(
                        _shape(row),
                        _split(row, software),
                        device,
                        software,
                        parts="InternEvo" in source,
                    ),
                    note=row["note"],
                )
            )
    if left_out:
        print(f"{left_out} rows left out: no shape, layout, time or known device", file=sys.stderr)
    return rows
