"""Where no wheel of Transformer Engine runs: there for Megatron-Bridge, which imports it, and not
for Megatron core, which asks whether it is there."""

import sys

frame = sys._getframe(1)
while frame.f_back is not None and frame.f_globals["__name__"].startswith("importlib"):
    frame = frame.f_back
if not frame.f_globals["__name__"].startswith("megatron.bridge."):
    raise ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine")
