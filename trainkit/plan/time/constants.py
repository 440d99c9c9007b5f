"""The constants of the time model: the makers' figures (hardware.toml) and what is reached of
them (fitted.json, by benchmarks/support/plan_calibrate.py)."""

from __future__ import annotations

import functools
import json
import tomllib
from pathlib import Path

from trainkit.plan.time.setup import Hardware

FOLDER = Path(__file__).parent
NARROW = {8: "eight", 4: "four"}


@functools.cache
def devices() -> dict[str, dict[str, float]]:
    """Rows of hardware.toml."""
    rows: dict[str, dict[str, float]] = tomllib.loads((FOLDER / "hardware.toml").read_text())[
        "devices"
    ]
    return rows


@functools.cache
def spread() -> dict[str, float]:
    """Standard deviations of a prediction's logarithm, by kind of model."""
    values: dict[str, float] = json.loads((FOLDER / "fitted.json").read_text())["spread"]
    return values


@functools.cache
def fitted() -> dict[str, float]:
    """What is reached, by name."""
    values: dict[str, float] = json.loads((FOLDER / "fitted.json").read_text())["constants"]
    return values


@functools.cache
def fitted_rows() -> dict[str, int]:
    """Public rows that the constants were fitted on, by `kind_of`."""
    values: dict[str, int] = json.loads((FOLDER / "fitted.json").read_text())["rows"]
    return values


def kind_of(machine: Hardware, software: str) -> str:
    """What a constant may differ by: "megatron, 8 bits, b200"."""
    return f"{software}, {machine.narrow} bits, {machine.generation}"


def machine(
    name: str,
    *,
    bits: int = 16,
    per_node: int = 8,
    network: float | None = None,
    world: int = 0,
    sockets: bool = False,
) -> Hardware | None:
    """A row as the model takes it; None where it lacks that precision, or a network that more
    than a node needs.

    Args:
        name: of the row.
        bits: of the operands of products.
        per_node: devices of a node.
        network: of a whole node, bytes a second one way; None: the reference design's.
        world: devices that are used; 0: more than a node.
    Raises:
        KeyError: no such row.
    """
    row = devices()[name]
    peak = row.get(NARROW.get(bits, "half"))
    domain = int(row.get("domain", per_node))
    share = network / per_node if network else row.get("network", 0.0) * 1e9
    if world and world <= domain:
        share = share or row["link"] * 1e9
    if peak is None or not share:
        return None
    return Hardware(
        generation=str(row["generation"]),
        peak=peak * 1e12,
        peak16=row["half"] * 1e12,
        narrow=bits,
        memory=row["memory"] * 1e9,
        link=row["link"] * 1e9,
        network=share,
        domain=domain,
        cores=int(row["cores"]),
        per_node=per_node,
        remote_memory=not sockets,
        known=network is not None or world <= domain,
    )
