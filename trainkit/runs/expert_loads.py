"""expert-loads.jsonl: how often tokens chose each expert, for maps of that. A line is {"step",
"steps": so many up to that one, "loads": a list a layer with a count an expert, zeros where a layer
has no experts, "dropped": a count a layer of the choices above an expert's capacity; lines of older
versions have none}.

Each row of metrics has its line at first. Beyond MOST lines the file is thinned: the newest RECENT
stay, of older ones the first of each stretch of 2^n steps, at most CELLS stretches. So it never
grows beyond MOST lines: 1 MB for 16 layers of 64 experts, 17 MB for 58 of 256.

Shapes: L layers of the whole model, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainkit.base.files import atomic_open
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.runs.folder import RunFolder
from trainkit.runs.phases import PictureLines

MOST = 128  # lines
RECENT = 32  # of them, that thinning leaves as they are
CELLS = 64  # stretches of steps that older lines stand for
NOW = 10  # lines that say how it is now
OVERFULL = 2.0  # times the mean of a layer
NAMED = 8  # experts that a sentence names

Counts = NDArray[np.int64]
Ratios = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of some steps.

    Args:
        step: the last of them.
        steps: how many.
        loads_LE: how often tokens chose each expert in them together, of all ranks.
        dropped_L: how many of a layer's choices were above the capacity.
    """

    step: int
    steps: int
    loads_LE: Counts
    dropped_L: Counts

    @property
    def layers(self) -> list[int]:
        """Those with experts: each token takes some in every one of them."""
        return [int(layer) for layer in np.flatnonzero(self.loads_LE.sum(1))]

    def over_mean(self) -> Ratios:
        """Loads in parts of the mean of their layer, of `layers` alone."""
        sparse_LE = self.loads_LE[self.layers].astype(np.float64)
        ratios_LE: Ratios = sparse_LE / sparse_LE.mean(1, keepdims=True)
        return ratios_LE

    def dead(self) -> list[tuple[int, int]]:
        """(layer, expert) of those without any row."""
        return [
            (layer, int(expert))
            for layer in self.layers
            for expert in np.flatnonzero(self.loads_LE[layer] == 0)
        ]

    def overfull(self) -> list[tuple[int, int, float]]:
        """(layer, expert, load over the mean) from OVERFULL on, the fullest first."""
        ratios_LE = self.over_mean()
        found = [
            (self.layers[at], int(expert), float(ratios_LE[at, expert]))
            for at, expert in np.argwhere(ratios_LE >= OVERFULL)
        ]
        return sorted(found, key=lambda each: -each[2])

    def dropped(self) -> tuple[float, int, float]:
        """Of choices of all layers the share that was dropped, and of which layer it is the largest
        and what it is there."""
        shares_L = self.dropped_L / self.loads_LE.sum(1).clip(1)
        layer = int(shares_L.argmax())
        whole = self.dropped_L.sum() / self.loads_LE.sum()
        return float(whole), layer, float(shares_L[layer])

    def row(self) -> dict[str, float]:
        """The table `experts` of a row of metrics (docs/run-folder.md)."""
        ratios_LE = self.over_mean()
        most_L = ratios_LE.max(1)
        return {
            "load_most": float(most_L.max()),
            "layer": self.layers[int(most_L.argmax())],
            "load_deviation": float(abs(ratios_LE - 1).mean()),
            "dead": len(self.dead()),
            "dropped": self.dropped()[0],
        }

    def to_json(self) -> dict[str, object]:
        """What `status --json` says of experts."""
        dead = [{"layer": layer, "expert": expert} for layer, expert in self.dead()]
        return {
            "step": self.step,
            "steps": self.steps,
            "dead": dead,
            "dropped": self.dropped()[0],
        }


def dead_in_words(loads: ExpertLoads) -> str:
    """A sentence that names experts without rows, and the way out; "" where there are none."""
    dead = loads.dead()
    if not dead:
        return ""
    named = [f"layer {layer} expert {expert}" for layer, expert in dead[:NAMED]]
    if len(dead) > NAMED:
        named.append(f"and {len(dead) - NAMED} more")
    return (
        f"Experts without a row in {loads.steps} steps up to step {loads.step}:"
        f" {', '.join(named)}; in [models.X.moe] raise aux_loss_coeff, or set"
        " router_enable_expert_bias = true under router_score_function = 'sigmoid'"
    )


def dropped_in_words(loads: ExpertLoads) -> str:
    """A sentence on choices above the capacity; "" where there are none."""
    share, layer, there = loads.dropped()
    if not share:
        return ""
    return (
        f"Choices dropped in {loads.steps} steps up to step {loads.step}: {share:.2%} of all,"
        f" {there:.2%} in layer {layer}; in [models.X.moe] raise expert_capacity_factor or"
        " aux_loss_coeff for less"
    )


class ExpertLoadsLog(PictureLines):
    """Appends lines; rank 0's.

    Args:
        path: the file. What it holds of later steps, and what is torn, is taken back.
        step: that training goes on from.
    """

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path, "loads of experts")
        self._count = 0
        if path.exists():
            with self.warned():
                self._rewrite([each for each in _read(path) if each.step <= step])

    def note(self, loads: ExpertLoads) -> None:
        """Write a line."""
        self.append(_line(loads))
        self._count += 1
        if self._count > MOST:
            with self.warned():
                self._rewrite(thinned(_read(self.path), RECENT))

    def _rewrite(self, lines: Sequence[ExpertLoads]) -> None:
        with atomic_open(self.path) as file:
            file.writelines(map(_line, lines))
        self._count = len(lines)


def thinned(lines: Sequence[ExpertLoads], recent: int = 0) -> list[ExpertLoads]:
    """At most CELLS lines at even distances, and the newest `recent`."""
    split = len(lines) - recent
    older = lines[:split]
    length = 1
    while older and older[-1].step > CELLS * length:
        length *= 2
    first = {(line.step - 1) // length: line for line in reversed(older)}
    return [*reversed(first.values()), *lines[split:]]


def expert_loads_path(run: RunFolder) -> Path:
    """The file of a run."""
    return run.path / "expert-loads.jsonl"


def read_expert_loads(run: RunFolder) -> list[ExpertLoads]:
    """All whole lines, in order; none of a model without experts."""
    try:
        return _read(expert_loads_path(run))
    except OSError:
        return []


def loads_now(lines: Sequence[ExpertLoads]) -> ExpertLoads | None:
    """The newest NOW lines together; None where there is none."""
    newest = lines[-NOW:]
    if not newest:
        return None
    return ExpertLoads(
        newest[-1].step,
        sum(line.steps for line in newest),
        np.sum([line.loads_LE for line in newest], axis=0),
        np.sum([line.dropped_L for line in newest], axis=0),
    )


def _line(loads: ExpertLoads) -> bytes:
    row = {
        "step": loads.step,
        "steps": loads.steps,
        "loads": loads.loads_LE.tolist(),
        "dropped": loads.dropped_L.tolist(),
    }
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> list[ExpertLoads]:
    """Where steps come again, the later lines count: what an attempt wrote that was taken for
    dead, or a failing disk kept from being taken back."""
    found: list[ExpertLoads] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            value = json.loads(line)
            loads_LE = np.array(value["loads"], dtype=np.int64)
            dropped_L = np.array(value.get("dropped", [0] * len(loads_LE)), dtype=np.int64)
            new = ExpertLoads(int(value["step"]), int(value["steps"]), loads_LE, dropped_L)
        except (ValueError, KeyError, TypeError):
            continue
        while found and found[-1].step >= new.step:
            found.pop()
        found.append(new)
    return found
