"""Which token follows: the distribution a token is drawn from, and the draw.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it; 0: always the likeliest token.
        top_k: draw among the k likeliest only, and those that tie with the k-th; 0: among all.
        top_p: draw among the fewest likeliest that have this probability together (Holtzman 2020,
            arXiv:1904.09751); 1: among all.
        seed: of the draws; every prompt begins with it.

    Raises:
        ConfigError: a value is out of its range (exit 1).
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature {self.temperature} is not a number from 0 on", exit=Exit.USAGE
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top-k {self.top_k} is below 0", exit=Exit.USAGE, hint="0 draws among all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top-p {self.top_p} is not above 0 and up to 1",
                exit=Exit.USAGE,
                hint="1 draws among all tokens",
            )


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from: (V) on the CPU, fp64, for a temperature above 0.

    The order is that of transformers: temperature, then top-k, then top-p over what top-k has
    left. In fp64 because any temperature must do, also one that fp32 would round to 0.
    """
    scores_V = logits_V.cpu().double()
    scores_V = (scores_V - scores_V.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scores_V):
        scores_V = scores_V.masked_fill(
            scores_V < scores_V.topk(sampling.top_k).values[-1], -torch.inf
        )
    p_V = scores_V.softmax(-1)
    if sampling.top_p == 1:
        return p_V
    descending_V, ids_V = p_V.sort(descending=True, stable=True)
    likelier_V = descending_V.cumsum(-1) - descending_V  # probability of all that come before
    p_V[ids_V[likelier_V >= sampling.top_p]] = 0
    return p_V / p_V.sum()


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token. One draw of `generator`, which lives on the CPU, so that a seed means the
    same on every device; none at temperature 0.

    Raises TrainkitError (exit 9) where a logit is not a finite number.
    """
    if not bool(logits_V.max().isfinite()):  # a maximum keeps nan
        raise TrainkitError(
            f"the model's highest logit is {float(logits_V.max())}",
            exit=Exit.RANK_USER,
            hint="its weights or precision are broken",
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(probabilities(logits_V, sampling), 1, generator=generator))
