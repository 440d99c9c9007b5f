"""The optimizer against torch's own over gradients that were unscaled and clipped by hand;
skipped steps; shards; resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.train.support import local_gradients
from trainkit.jobs.optimizers import KEPT
from trainkit.jobs.schema import Training
from trainkit.ops import adamw
from trainkit.train.torch_compat import local_part
from trainkit.train.update.optimizer import Optimizer, divisor, squared_norm

SHAPES = {"embed.weight": (7, 5), "mlp.weight": (5, 5), "mlp.bias": (5,), "norm.weight": (5,)}
GO, SKIP = torch.tensor(False), torch.tensor(True)
ONE = torch.tensor(1.0)


def training(optimizer: str, **keys: Any) -> Training:
    """Constants that are not torch's own defaults."""
    usual = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_eps": 1e-3,
        "sgd_momentum": 0.7,
        "weight_decay": 0.3,
    }
    return Training(**{"train_iters": 9, "lr": 0.1, "optimizer": optimizer, **usual, **keys})


def new_parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in SHAPES.items()
    }


def gradients_of(step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Of global norm 2 to 20, so that a limit of 5 clips some."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: (0.4 + step) * torch.randn(shape, generator=generator, dtype=dtype)
        for name, shape in SHAPES.items()
    }


def take(
    optimizer: Optimizer,
    parameters: dict[str, nn.Parameter],
    step: int,
    skip: Tensor = GO,
    scale: Tensor = ONE,
    limit: float = 0.0,
) -> None:
    """One step as the training loop takes it."""
    for name, gradient in gradients_of(step, parameters["mlp.bias"].dtype).items():
        parameters[name].grad = gradient * scale
    norm = squared_norm(local_gradients(parameters.values())).sqrt()
    optimizer.step(rate_of(step), divisor(norm, limit, scale), skip)
    optimizer.zero_grad()


def rate_of(step: int) -> Tensor:
    return torch.tensor(0.1 / (1 + step), dtype=torch.float32)


def everything(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of weights, state and count."""
    found = {**parameters, **optimizer.state_tensors(), "steps": optimizer.steps}
    return {name: t.detach().clone() for name, t in found.items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def torchs_own(
    optimizer: str, parameters: dict[str, nn.Parameter], t: Training
) -> torch.optim.Optimizer:
    """torch's plain form with the groups written out by hand. Its SGD has no decoupled decay:
    the test below decays before it."""
    groups = [
        {
            "params": [parameters["embed.weight"], parameters["mlp.weight"]],
            "weight_decay": t.weight_decay if optimizer == "adam" else 0.0,
        },
        {"params": [parameters["mlp.bias"], parameters["norm.weight"]], "weight_decay": 0.0},
    ]
    if optimizer == "adam":
        return torch.optim.AdamW(
            groups, betas=(t.adam_beta1, t.adam_beta2), eps=t.adam_eps, foreach=False
        )
    return torch.optim.SGD(groups, momentum=t.sgd_momentum, foreach=False)


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [("adam", {}), ("sgd", {}), ("sgd", {"sgd_momentum": 0.0}), ("sgd", {"weight_decay": 0.0})],
)
@pytest.mark.parametrize(("scale", "limit"), [(1.0, 0.0), (65536.0, 0.0), (65536.0, 5.0)])
def test_equals_torchs_own_over_gradients_unscaled_and_clipped_by_hand(
    optimizer: str, keys: dict[str, Any], scale: float, limit: float
) -> None:
    t = training(optimizer, **keys)
    ours, theirs = new_parameters(), new_parameters()
    mine, reference = Optimizer(ours, t), torchs_own(optimizer, theirs, t)
    clipped = 0
    # divisor and SGD's decay are fp32; a power of two is exact
    tolerance = 1e-6 if limit or (optimizer == "sgd" and t.weight_decay) else 1e-12
    for step in range(6):
        take(mine, ours, step, scale=torch.tensor(scale), limit=limit)
        for name, gradient in gradients_of(step).items():
            theirs[name].grad = gradient
        clipped += bool(limit and nn.utils.clip_grad_norm_(theirs.values(), limit) > limit)
        for group in reference.param_groups:
            group["lr"] = float(rate_of(step))
        if optimizer == "sgd":
            for name in ("embed.weight", "mlp.weight"):
                theirs[name].data *= 1 - float(rate_of(step)) * t.weight_decay
        reference.step()
        for name in SHAPES:
            torch.testing.assert_close(
                ours[name],
                theirs[name],
                rtol=tolerance,
                atol=tolerance,
                msg=f"{name} at step {step}",
            )
    assert clipped in ((0,) if limit == 0 else range(1, 6))
    assert mine.applied_steps() == 6


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_skipped_step_changes_no_bit(optimizer: str, before: int) -> None:
    """Not even the first of all, nor with gradients and a divisor that are not numbers."""
    parameters = new_parameters(torch.float32)
    optimizer_ = Optimizer(parameters, training(optimizer))
    for step in range(before):
        take(optimizer_, parameters, step)
    then = everything(optimizer_, parameters)
    for bad in (1.0, float("inf"), float("nan")):
        for name, gradient in gradients_of(before, torch.float32).items():
            parameters[name].grad = gradient * bad
        optimizer_.step(rate_of(before), torch.tensor(bad), SKIP)
        assert_same(everything(optimizer_, parameters), then)
    twin = new_parameters(torch.float32)
    never_skipped = Optimizer(twin, training(optimizer))
    for step in range(before + 2):
        take(never_skipped, twin, step)
    for step in (before, before + 1):
        take(optimizer_, parameters, step)
    assert_same(everything(optimizer_, parameters), everything(never_skipped, twin))
    assert optimizer_.applied_steps() == before + 2


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_parameter_without_a_gradient_stays(optimizer: str) -> None:
    parameters = new_parameters()
    optimizer_ = Optimizer(parameters, training(optimizer))
    take(optimizer_, parameters, 0)
    before = everything(optimizer_, parameters)
    parameters["mlp.bias"].grad = torch.ones(5, dtype=torch.float64)
    optimizer_.step(rate_of(1), ONE, GO)
    after = everything(optimizer_, parameters)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    moments = {
        "adam": {"exp_avg.mlp.bias", "exp_avg_sq.mlp.bias"},
        "sgd": {"momentum_buffer.mlp.bias"},
    }[optimizer]
    assert changed == {"mlp.bias", "steps"} | moments


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_going_on_from_saved_state(optimizer: str) -> None:
    """Bit for bit as if never stopped, with a skipped step before the save."""
    parameters = new_parameters(torch.float32)
    whole = Optimizer(parameters, training(optimizer))
    for step in range(6):
        take(whole, parameters, step, skip=SKIP if step == 1 else GO)
        if step == 2:
            saved, count = everything(whole, parameters), whole.applied_steps()
    assert count == 2
    resumed = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    other = Optimizer(resumed, training(optimizer))
    for name, tensor in {**resumed, **other.state_tensors()}.items():
        tensor.data.copy_(saved[name])
    other.set_steps(count)
    for step in range(3, 6):
        take(other, resumed, step)
    assert_same(everything(other, resumed), everything(whole, parameters))


def test_state_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer may keep nothing, or something else, of biases and norms."""
    monkeypatch.setitem(
        KEPT,
        "sgd",
        lambda training, role: ("momentum_buffer",) if role == "matrix" else ("exp_avg",),
    )
    tensors = Optimizer(new_parameters(), training("sgd")).state_tensors()
    assert list(tensors) == [
        "momentum_buffer.embed.weight",
        "momentum_buffer.mlp.weight",
        "exp_avg.mlp.bias",
        "exp_avg.norm.weight",
    ]


def test_names_of_the_state() -> None:
    moments = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
    for optimizer, names in moments.items():
        assert list(Optimizer(new_parameters(), training(optimizer)).state_tensors()) == [
            f"{m}.{name}" for m in names for name in SHAPES
        ]
    assert Optimizer(new_parameters(), training("sgd", sgd_momentum=0.0)).state_tensors() == {}


def test_gradients_are_freed_and_weights_that_moved_are_found() -> None:
    """fully_shard may give a parameter other storage at the first forward."""
    parameters = new_parameters()
    optimizer = Optimizer(parameters, training("sgd"))
    for p in parameters.values():
        p.data = p.data.clone()
    before = parameters["mlp.bias"].detach().clone()
    take(optimizer, parameters, 0)
    assert not torch.equal(before, parameters["mlp.bias"].detach())
    assert all(p.grad is None for p in parameters.values())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The last of four ranks that are not there: what it holds of 5 or 7 rows is little or
    nothing."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_rank_updates_its_shards(optimizer: str, mesh: DeviceMesh) -> None:
    """Rows 6 of 7; none of 5: ceil(5 / 4) = 2 rows a rank leave nothing for the fourth."""
    wholes = new_parameters(torch.float32)

    def on_the_last_rank(whole: Tensor) -> Tensor:
        mine = (whole[6:] if len(whole) == 7 else whole[:0]).detach().clone()
        return DTensor.from_local(
            mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    sharded = {name: nn.Parameter(on_the_last_rank(p)) for name, p in wholes.items()}
    ours, reference = (
        Optimizer(sharded, training(optimizer)),
        Optimizer(wholes, training(optimizer)),
    )
    for step in range(3):
        for name, gradient in gradients_of(step, torch.float32).items():
            wholes[name].grad, sharded[name].grad = gradient, on_the_last_rank(gradient)
        mine = gradients_of(step, torch.float32)["embed.weight"][6:].double()
        assert float(squared_norm(local_gradients(sharded.values()))) == pytest.approx(
            float(mine.square().sum()), rel=1e-12
        )
        for each in (ours, reference):
            each.step(rate_of(step), torch.tensor(2.0), GO)
            each.zero_grad()
    torch.testing.assert_close(
        local_part(sharded["embed.weight"]), wholes["embed.weight"].detach()[6:], rtol=1e-6, atol=0
    )
    states = ours.state_tensors()
    for name, tensor in states.items():
        parameter = sharded[name.split(".", 1)[1]]
        assert (
            isinstance(tensor, DTensor)
            and tensor.shape == parameter.shape
            and tensor.placements == (Shard(0),)
        ), name
        assert local_part(tensor).shape == local_part(parameter).shape
        assert local_part(tensor).numel() == 0 or local_part(tensor).abs().min() > 0
        local_part(tensor).fill_(7)
    # reading into them is loading
    assert all(torch.all(local_part(tensor) == 7) for tensor in ours.state_tensors().values())
    assert all(p.grad is None for p in sharded.values()) and ours.applied_steps() == 3


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e6), st.floats(1e-3, 1e3), st.integers(0, 32).map(lambda power: 2.0**power))
def test_the_divisor_unscales_and_clips(norm: float, limit: float, scale: float) -> None:
    """`norm` is that of the true gradients; the device sees `scale` times as much."""
    found = float(
        divisor(torch.tensor(norm * scale, dtype=torch.float64), limit, torch.tensor(scale))
    )
    assert found == pytest.approx(scale / min(1.0, limit / (norm + 1e-6)), rel=1e-12)
    assert (
        float(divisor(torch.tensor(norm * scale, dtype=torch.float64), 0.0, torch.tensor(scale)))
        == scale
    )


def test_the_divisor_hides_no_overflow() -> None:
    for norm in (float("nan"), float("inf")):
        assert not torch.isfinite(
            divisor(torch.tensor(norm, dtype=torch.float64), 1.0, torch.tensor(4.0))
        )


def test_the_norm_is_exact_to_fp64_over_chunks_and_empty_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fp32 alone would leave 1e-8; an element too small to square in fp32 still counts."""
    monkeypatch.setattr(adamw, "CHUNK", 16)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(n, 3, generator=generator) for n in (5, 16, 0, 37)] + [
        torch.full((4,), 1e-30)
    ]
    exact = sum(float(x) ** 2 for g in gradients for x in g.reshape(-1).tolist())
    assert float(squared_norm(gradients)) == pytest.approx(exact, rel=1e-14)
    assert float(squared_norm([gradients[-1]])) == pytest.approx(4e-60, rel=1e-6)
    assert float(squared_norm([gradients[2]])) == 0.0
    gradients[1][3, 1] = float("inf")
    assert not torch.isfinite(squared_norm(gradients))
