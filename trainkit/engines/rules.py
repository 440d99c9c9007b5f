"""What `trainkit.plan` is to know of all published engines; each engine's own rules lie over it."""

from __future__ import annotations

from trainkit.jobs.devices import Precision
from trainkit.plan.rules import Rules, StateBytes

FP32 = StateBytes(weights=4, gradients=4, master=0, moment=4)
# 16-bit weights 2, fp32 master 4, Adam's moments 8: 14 bytes. GPT-NeoX-20B 268 GiB, BLOOM-176B
# 2.244 TiB as published.
WRITTEN: dict[Precision, int] = {"fp32": 4, "bf16": 6, "fp16": 6}
# What the native trainer has and no published engine does.
PUBLISHED = Rules(
    zero_bubble=False,
    uneven_shares=False,
    repeats_groups=False,
    replicates=False,
)
