"""The names that Megatron-Bridge's LoRA looks at, and layers of Megatron core's own for its
models."""

from megatron.bridge.models import gpt_provider

gpt_provider.transformer_engine_layer_spec = gpt_provider.local_layer_spec


class Linear:
    pass


class LayerNormLinear:
    pass


class ops:
    class Sequential:
        pass
