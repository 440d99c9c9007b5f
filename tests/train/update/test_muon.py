"""Muon of whole matrices on one rank: against torch's, and what its definition promises. Layouts
are compared in tests/train/parallel/test_layout_matrix.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.plain_loop import MODELS, TRAINING
from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Model, Training
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.shards import sharded_parameters
from trainkit.train.update.muon import Matrices, items_of, orthogonal
from trainkit.train.update.optimizer import Optimizer

ONE, GO, SKIP = torch.tensor(1.0), torch.tensor(False), torch.tensor(True)
RATE = torch.tensor(0.02)


def training(**keys: Any) -> Training:
    return Training(**{**TRAINING, "optimizer": "muon", **keys})


def optimizer_of(module: Transformer, model: Model, t: Training) -> Optimizer:
    sharded = sharded_parameters(module, 1)
    whole = {n: s for n, s in sharded.items() if role_of(n, len(s.layout.shape)) == "matrix"}
    parameters = {name: each.parameter for name, each in sharded.items()}
    return Optimizer(parameters, t, matrices=[Matrices(model, whole)])


def module_of(model: Model, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model, 31).to(dtype)


def gradients(module: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype)
        for name, p in module.named_parameters()
    }


def give(module: nn.Module, found: dict[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        p.grad = found[name].clone()


@pytest.mark.parametrize(
    ("scale_mode", "torchs"), [("original", "original"), ("match_rms_adamw", "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_that_is_one_is_torchs(scale_mode: Any, torchs: str, nesterov: bool) -> None:
    """torch.optim.Muon, whose iterations are bf16 always: the same weights after five steps, but
    for how bf16 rounds."""
    model = MODELS["gpt"]
    t = training(
        muon_scale_mode=scale_mode,
        muon_nesterov=nesterov,
        weight_decay=0.3,
        muon_precision="bf16",
    )
    module = module_of(model)
    mine = optimizer_of(module, model, t)
    alone = {n: p for n, p in module.named_parameters() if n.endswith("mlp.up.weight")}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in alone.items()}
    reference = torch.optim.Muon(
        theirs.values(),
        lr=float(RATE),
        weight_decay=0.3,
        nesterov=nesterov,
        adjust_lr_fn=torchs,
    )
    before = {name: p.detach().clone() for name, p in alone.items()}
    for step in range(5):
        found = gradients(module, step)
        give(module, found)
        for name, p in theirs.items():
            p.grad = found[name].clone()
        mine.step(RATE, ONE, GO)
        reference.step()  # type: ignore[no-untyped-call]
    for name, p in alone.items():
        moved = (p - before[name]).norm()
        assert (p - theirs[name]).norm() < 0.01 * moved


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt"])
def test_what_is_stored_together_is_updated_apart(name: str) -> None:
    """Queries, keys, values, gates and values of the MLP are matrices of their own: the update of
    each has singular values near 1, and those of a stored parameter follow from its parts."""
    model = MODELS[name]
    module = module_of(model, torch.float64)
    t = training(weight_decay=0.0, muon_scale_mode="spectral")
    mine = optimizer_of(module, model, t)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    give(module, gradients(module, 0))
    mine.step(RATE, ONE, GO)
    seen = 0
    for n, p in module.named_parameters():
        if role_of(n, p.dim()) != "matrix":
            continue
        update = (before[n] - p.detach()) / RATE.double()
        rows = [r for item in items_of(n, tuple(p.shape), model) for r in item.parts]
        assert len(rows) == {"qkv": 3, "gate_up": 2}.get(n.split(".")[-2], 1)
        for part in torch.split(update, rows):
            values = torch.linalg.svdvals(part) / max(part.shape) ** 0.5
            # of a square of random numbers the last is near 0
            assert values[-2] > 0.3 and values.max() < 1.6
            seen += 1
    assert seen == model.num_layers * (6 if model.mlp.gated else 5) + model.num_layers


def test_who_is_updated_by_what() -> None:
    """By role, not by dimensions: embeddings and head are AdamW's, though they are matrices."""
    model = MODELS["gpt-untied"]
    kept = optimizer_of(module_of(model), model, training()).state_tensors()
    of_muon = {name.split(".", 1)[1] for name in kept if name.startswith("momentum_buffer.")}
    of_adamw = {name.split(".", 1)[1] for name in kept if name.startswith("exp_avg_sq.")}
    assert not of_muon & of_adamw
    names = {name for name, _ in module_of(model).named_parameters()}
    assert of_muon | of_adamw == names
    assert {"embed_tokens.weight", "embed_positions.weight", "head.weight"} <= of_adamw
    ends = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assert of_muon == {name for name in names if name.endswith(ends)}


def test_a_skipped_step_changes_no_bit_and_gradients_stay() -> None:
    model = MODELS["llama"]
    module = module_of(model)
    mine = optimizer_of(module, model, training())
    give(module, gradients(module, 0))
    mine.step(RATE, ONE, GO)
    then = {n: p.detach().clone() for n, p in module.named_parameters()}
    kept = {n: state.clone() for n, state in mine.state_tensors().items()}
    for bad in (float("inf"), float("nan")):
        give(module, {n: g * bad for n, g in gradients(module, 1).items()})
        mine.step(RATE, torch.tensor(bad), SKIP)
    assert all(torch.equal(p, then[n]) for n, p in module.named_parameters())
    assert all(torch.equal(state, kept[n]) for n, state in mine.state_tensors().items())
    found = gradients(module, 2)
    give(module, found)
    mine.step(RATE, ONE, GO)
    matrices = [n for n, p in module.named_parameters() if role_of(n, p.dim()) == "matrix"]
    grads = {n: p.grad for n, p in module.named_parameters()}
    assert all(torch.equal(grads[n], found[n]) for n in matrices)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows_and_columns", [(8, 32), (32, 8), (16, 16), (1, 5)])
@pytest.mark.parametrize("kind", ["simple", "quintic", "polar_express"])
def test_iterations_end_near_one(rows_and_columns: tuple[int, int], kind: Any) -> None:
    u_MN = torch.randn(*rows_and_columns, dtype=torch.float64)
    t = training(muon_coefficient_type=kind)
    x_MN = orthogonal(u_MN, t)
    values = torch.linalg.svdvals(x_MN)
    assert values[: max(1, len(values) - 1)].min() > 0.3 and values.max() < 1.6
    # the singular vectors are u's
    left, _, right = torch.linalg.svd(u_MN, full_matrices=False)
    inside = left.T @ x_MN @ right.T
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()), rtol=0, atol=1e-9)
    assert not orthogonal(torch.zeros(4, 6), t).any()


def test_arithmetic_follows_the_training() -> None:
    """A CPU may have no bf16 of its own: a training in fp32 does not ask it to."""
    u_MN = torch.randn(8, 32)
    by = {p: orthogonal(u_MN, training(muon_precision=p)) for p in ("fp32", "bf16")}
    assert not torch.equal(by["fp32"], by["bf16"])
    for precision, usual in (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "bf16")):
        assert torch.equal(orthogonal(u_MN, training(precision=precision)), by[usual])


def test_a_rate_of_its_own_for_all_else() -> None:
    model = MODELS["gpt"]
    moved = []
    for keys in ({}, {"muon_scalar_lr": 0.0}, {"muon_scalar_lr": 2 * TRAINING["lr"]}):
        module = module_of(model)
        mine = optimizer_of(module, model, training(weight_decay=0.0, **keys))
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        give(module, gradients(module, 0))
        mine.step(RATE, ONE, GO)
        moved.append({n: (p.detach() - before[n]).norm() for n, p in module.named_parameters()})
    plain, none, double = moved
    for name in plain:
        if name.startswith("layers.") and name.endswith("weight") and "norm" not in name:
            assert plain[name] == none[name] == double[name] > 0
        else:
            assert none[name] == 0
            torch.testing.assert_close(double[name], 2 * plain[name], rtol=1e-4, atol=0)
