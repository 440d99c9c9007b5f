"""While rows travel to experts, and their gradients back, the shared expert is computed."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from tests.train.model.test_experts import model_of, random_weights
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.transformer import Block, build_on_meta
from trainkit.train.parallel import expert_parallel
from trainkit.train.parallel.expert_parallel import ExpertGroup
from trainkit.train.parallel.tensor_group import TensorGroup


def test_the_shared_expert_is_computed_while_rows_travel() -> None:
    """In forward, and in backward while their gradients do. Without peers: what would come from the
    other of two ranks is what is sent to it."""
    model = model_of(num_experts=4, shared_expert_intermediate_size=6)
    module = build_on_meta(model, 31)
    expert_parallel.apply(module, ExpertGroup(parts=2), TensorGroup())
    module.to_empty(device="cpu")
    random_weights(module)
    block = module.layers["0"]
    assert isinstance(block, Block) and isinstance(block.mlp, MixtureOfExperts)
    shared = block.mlp.shared_expert
    assert shared is not None
    happened: list[str] = []
    shared.register_forward_hook(lambda *_: happened.append("shared expert"))
    shared.register_full_backward_hook(lambda *_: happened.append("its gradients"))

    def begin(x: Tensor, *_: object) -> Tensor:
        happened.append("rows go")
        return x.clone()

    def finish(coming: Tensor) -> Tensor:
        happened.append("rows are there")
        return coming

    with (
        mock.patch.object(expert_parallel, "begin_exchange", begin),
        mock.patch.object(expert_parallel, "finish_exchange", finish),
        mock.patch.object(expert_parallel, "exchanged", lambda x, *_: x),
    ):
        y_BSH = block.mlp(torch.randn(2, 8, 16, requires_grad=True), None)
        assert happened == ["rows go", "shared expert", "rows are there"]
        happened.clear()
        torch.autograd.backward(y_BSH.sum())
    assert happened == ["rows go", "its gradients", "rows are there"]
