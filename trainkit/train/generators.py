"""Random numbers of dropout."""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """torch.manual_seed for the host and for the GPUs in use. Of accelerators that are not in use
    torch's own keeps every call for later, with the stack it came from: some milliseconds and
    kilobytes each."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
