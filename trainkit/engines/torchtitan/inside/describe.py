"""Run by torchtitan's own interpreter: what one of its configurations says, as a line of JSON.

python -m trainkit.engines.torchtitan.inside.describe --module llama3 --config llama3_8b ...
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config import ConfigManager

from trainkit.engines.torchtitan.inside.config import model_spec

MARK = "[trainkit] "
FAMILIES = {"llama3": "llama", "qwen3": "qwen3"}  # ours, by the name of its specification


def leaves(value: Any, name: str = "", default: Any = dataclasses.MISSING) -> Iterator[Any]:
    """(dotted name, value, whether it is the field's default) of all that is in a configuration.
    Of a part that is a class of its own its name is a leaf, too."""
    if dataclasses.is_dataclass(value):
        if name:
            yield name, type(value).__qualname__, type(value) is type(default)
        for field in dataclasses.fields(value):
            usual = field.default
            if field.default_factory is not dataclasses.MISSING:
                usual = field.default_factory()
            inner = f"{name}.{field.name}" if name else field.name
            yield from leaves(getattr(value, field.name), inner, usual)
    elif isinstance(value, (list, tuple)) and any(map(dataclasses.is_dataclass, value)):
        for number, each in enumerate(value):
            yield from leaves(each, f"{name}.{number}")
    else:
        yield name, plain(value), plain(value) == plain(default)


def plain(value: Any) -> Any:
    """As JSON has it; what it cannot hold by its name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, functools.partial):
        return [plain(value.func), plain(value.args), plain(value.keywords)]
    if type(value).__module__ == "torch":
        return str(value)  # a dtype
    return getattr(value, "__qualname__", type(value).__qualname__)


def shape_of(spec: Any) -> Mapping[str, Any]:
    """A model as config.py takes it. Raises ValueError where it has no such."""
    model = spec.model
    if spec.name not in FAMILIES:
        raise ValueError(f"models of {spec.name} are not trained by this version of trainkit")
    if any(layer.moe for layer in model.layers):
        raise ValueError("experts are not trained by this version of trainkit")
    block = model.layers[0]
    attention = block.attention
    rope = attention.rope
    scaling = {}
    if rope.scaling == "llama":
        names = ("scaling", "scaling_factor", "low_freq_factor", "high_freq_factor")
        scaling = {name: getattr(rope, name) for name in names}
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return {
        "family": FAMILIES[spec.name],
        "dim": model.dim,
        "n_layers": len(model.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": attention.n_kv_heads,  # None: as many as heads
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "hidden_dim": block.feed_forward.w1.out_features,
        "vocab_size": model.vocab_size,
        "theta": rope.theta,
        "scaling": scaling,
        "max_seq_len": rope.max_seq_len,
        "eps": block.attention_norm.eps,
        "tied": model.enable_weight_tying,
    }


def differences(spec: Any, shape: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name, without the layer's number, what it has and what the model that trainkit makes of
    the shape has: of a part that is another class, its class alone."""
    theirs = _by_layer(spec.model)
    ours = _by_layer(model_spec(shape).model)
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*theirs, *ours]):
        above = any(name.startswith(f"{part}.") for part in found)
        if theirs.get(name) != ours.get(name) and not above:
            found[name] = (theirs.get(name), ours.get(name))
    return found


def _by_layer(model: Any) -> Mapping[str, Any]:
    found: dict[str, list[Any]] = {}
    for name, value, _ in leaves(model):
        values = found.setdefault(re.sub(r"^layers\.\d+\.", "layers.", name), [])
        if value not in values:
            values.append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def main() -> None:
    config = ConfigManager().parse_args(sys.argv[1:])
    try:
        shape = shape_of(config.model_spec)
        said = {"why": "", "model": shape, "differences": differences(config.model_spec, shape)}
    except ValueError as error:
        said = {"why": str(error)}
    config.model_spec = None
    options = {name: (value, usual) for name, value, usual in leaves(config)}
    print(MARK + json.dumps({**said, "options": options}), flush=True)


if __name__ == "__main__":
    main()
