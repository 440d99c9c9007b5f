"""Ranks of which one computes a wrong bit: run by update/test_gradient_replay.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.train.policies import trainer
from tests.train.support import whole
from trainkit.base.errors import TrainkitError
from trainkit.runs.metrics import read_rows
from trainkit.train.parallel import data_parallel
from trainkit.train.trainer import Trainer
from trainkit.train.update import gradient_replay

STEPS = 6


@dataclass(frozen=True)
class Fault:
    """One bit of one element of a gradient is flipped.

    Args:
        rank: where.
        step: in which step; None: in all of them.
        pass_: in which backward of a step, from 0, of which the first is the neighbour's in a step
            that compares; None: in all.
        weight: in the gradient of a weight, else in that of an activation.
        bit: which, from the lowest.
    """

    rank: int
    step: int | None = None
    pass_: int | None = None
    weight: bool = True
    bit: int = 0


WHERE = "layers.1.mlp.down"


def flipped(gradient: Tensor, bit: int) -> Tensor:
    """One bit of the sixth element, of 32 where it is in fp64: torch 2.15 shows hooks a weight's
    gradient in the type of its sums."""
    wrong = gradient.detach().clone().contiguous()
    wrong = wrong.float() if wrong.dtype == torch.float64 else wrong
    wrong.view(-1).view({2: torch.int16, 4: torch.int32}[wrong.element_size()])[5] ^= 1 << bit
    return wrong.to(gradient.dtype)


def be_faulty(made: Trainer, fault: Fault) -> None:
    """Patch this rank where it is the faulty one."""
    if made.world.rank != fault.rank:
        return
    passes: dict[int, int] = {}
    seen: set[int] = set()

    def spoil(gradient: Tensor) -> Tensor:
        step = made.step + 1
        number = passes[step] = passes.get(step, -1) + 1
        here = fault.step in (None, step) and fault.pass_ in (None, number)
        return flipped(gradient, fault.bit) if here else gradient

    def attach(module: torch.nn.Module, given: Any, y_BSH: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if not fault.weight:
            y_BSH.register_hook(spoil)  # type: ignore[no-untyped-call]
        elif id(weight) not in seen:
            seen.add(id(weight))
            weight.register_hook(spoil)  # type: ignore[no-untyped-call]

    for module in made.model_parts.modules:
        module.get_submodule(WHERE).register_forward_hook(attach)


class Waits(Exception):
    """In the place of waiting for the end of the rank that is named."""


def wait() -> None:
    raise Waits


def run(root: Path, fault: Fault | None, keys: dict[str, Any]) -> dict[str, Any]:
    """Train; what is left. Of ranks that are not named the code is None, and they stay."""
    made = trainer(root, **{"train_iters": STEPS, "micro_batch_size": 1, **keys})
    if fault is not None:
        be_faulty(made, fault)
    error, code = "", None
    try:
        code = int(made.train())
    except TrainkitError as raised:
        error, code = str(raised), int(raised.exit)
    except Waits:
        pass
    rows = [(row["step"], row["lm_loss"], row["grad_norm"]) for row in read_rows(made.run.metrics)]
    weights = whole(made.step_runner.tensors())
    return {"error": error, "code": code, "step": made.step, "weights": weights, "rows": rows}


def runs(root: Path, cases: dict[str, tuple[Fault | None, dict[str, Any]]]) -> dict[str, Any]:
    """Several, one after another, in one process group."""
    data_parallel.join = functools.cache(data_parallel.join)
    gradient_replay.wait_for_its_end = wait
    return {name: run(root / name, *case) for name, case in cases.items()}


def end(root: Path, fault: Fault, keys: dict[str, Any]) -> dict[str, Any]:
    """What this rank says of its end, as main.py writes it down."""
    made = trainer(root, micro_batch_size=1, **keys)
    be_faulty(made, fault)
    try:
        made.train()
    except TrainkitError as error:
        return {"type": "TrainkitError", "message": str(error), "exit": int(error.exit)}
    except RuntimeError as error:
        return {"type": type(error).__name__, "message": str(error), "exit": 9}
    raise AssertionError("nothing was found")
