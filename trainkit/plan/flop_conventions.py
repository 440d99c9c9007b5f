"""FLOPs a token as papers and other trainers have counted them: to compare a report with theirs.
trainkit's own count is in arithmetic.py."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.jobs.schema import Model
from trainkit.plan.arithmetic import parameters_of


def megatron_2021(model: Model, vocab_size: int, *, recomputed: bool = True) -> float:
    """96 L H^2 (1 + S / 6H + V / 16LH) (Narayanan et al. 2021, arXiv:2104.04473, eq. 3):
    attention whole, not causal, F = 4H, every layer computed again in backward; 72 L H^2 (1 + S
    / 6H + V / 12LH) without recomputation (Korthikanti et al. 2022, arXiv:2205.05198, appendix
    A)."""
    layers = model.num_layers
    h = model.hidden_size
    s = model.seq_length
    if recomputed:
        return 96 * layers * h * h * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
    return 72 * layers * h * h * (1 + s / (6 * h) + vocab_size / (12 * layers * h))


def palm_6n(model: Model, vocab_size: int) -> float:
    """6N + 12 L H S (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): all parameters,
    attention whole, no recomputation."""
    return (
        6 * parameters_of(model, vocab_size)
        + 12 * model.num_layers * model.hidden_size * model.seq_length
    )


def gpt_neox_2022(model: Model, vocab_size: int) -> float:
    """6N + 60 S H L (GPT-NeoX, megatron/logging.py get_flops until 2023)."""
    return (
        6 * parameters_of(model, vocab_size)
        + 60 * model.seq_length * model.hidden_size * model.num_layers
    )


# By name: FLOPs a token of (model, vocabulary as the engine padded it).
CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "megatron-2021": megatron_2021,
    "palm-6n": palm_6n,
    "gpt-neox-2022": gpt_neox_2022,
}


def tflops_per_device(
    convention: str, model: Model, vocab_size: int, samples_per_second: float, devices: int
) -> float:
    """TFLOP/s of each device as `convention` counts them. Raises KeyError for one that is not in
    CONVENTIONS."""
    return (
        CONVENTIONS[convention](model, vocab_size)
        * samples_per_second
        * model.seq_length
        / devices
        / 1e12
    )
