"""What stands after attention in a block: two projections around an activation, or three with a
gate.

Shapes: B samples, S tokens of a sample, H hidden size, F width of the MLP.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.ops.kernels import Kernels
from trainkit.train.model.projection import Projection


class MLP(nn.Module):
    """Two projections around GELU, in GPT-2's tanh form or the exact one of most GPT-NeoX models,
    or around the square of ReLU."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.gelu = kernels.gelu if model.mlp.gelu else None
        self.approximate = approximation(model)
        bias = model.architecture.bias
        self.up = Projection(model.hidden_size, model.ffn_width, bias=bias)
        self.down = Projection(model.ffn_width, model.hidden_size, bias=bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSF = self.up(x_BSH)
        y_BSF = F.relu(y_BSF).square() if self.gelu is None else self.gelu(y_BSF, self.approximate)
        y_BSH: Tensor = self.down(y_BSF)
        return y_BSH


def approximation(model: Model) -> str:
    """The form of GELU, by torch's word."""
    return "tanh" if model.gelu_form == "tanh" else "none"


class GatedMLP(nn.Module):
    """SwiGLU or GeGLU (Shazeer 2020, arXiv:2002.05202): rows of `gate_up` are all gates, then all
    values."""

    def __init__(self, model: Model, kernels: Kernels, width: int) -> None:
        super().__init__()
        self.swiglu = kernels.swiglu
        self.geglu = kernels.geglu if model.mlp.gelu else None
        self.approximate = approximation(model)
        bias = model.architecture.bias
        self.gate_up = Projection(model.hidden_size, 2 * width, bias=bias)
        self.down = Projection(width, model.hidden_size, bias=bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSF = self.gate_up(x_BSH)
        h_BSF = self.swiglu(x_BSF) if self.geglu is None else self.geglu(x_BSF, self.approximate)
        y_BSH: Tensor = self.down(h_BSF)
        return y_BSH
