"""Where attention looks, as config.json says it: rotary positions and sliding windows, written for
a model and compared with a job's.

Rotary positions stand in keys of their own up to transformers 4 (rope_theta, rope_scaling;
rotary_pct, rotary_emb_base) and in `rope_parameters` since 5, which reads the old ones too: both
are written, either is read. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from trainkit.base.errors import Problem
from trainkit.families.contract import RotaryKeys
from trainkit.jobs.schema import Model, RopeScaling

# transformers' value where the key is absent or null
MAX_POSITIONS = 2048
# what is said of a stretching of rotary positions besides its type
STRETCH_KEYS: Mapping[object, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
# its names of layers without a window and with one
FULL = "full_attention"
SLIDING = "sliding_attention"


def setting_of(model: Model, key: str) -> str:
    """The name of a key of the job's model, to be named in a message."""
    return f"models.{model.name}.{key}" if model.name else f"model.{key}"


def toml_value(value: object) -> str:
    """A value as it is written in jobs.toml."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def rotary_keys(model: Model) -> dict[str, object]:
    """Rotary positions in the keys of transformers 4 and of 5; none where positions are learned."""
    names = model.architecture.hugging_face.rotary
    if names is None:
        return {}
    settings = model.architecture.settings
    keys: dict[str, object] = {"max_position_embeddings": model.positions}
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": model.theta}
    if "rotary_percent" in settings:
        keys[names.fraction] = model.rotary_fraction
        parameters["partial_rotary_factor"] = model.rotary_fraction
    keys[names.theta] = model.theta
    if "rope_scaling" in settings:
        scaling = None
        if model.rope_scaling is not None:
            scaling = {"rope_type": model.rope_scaling.type, **_stretch(model.rope_scaling)}
            parameters = {**scaling, "rope_theta": model.theta}
        keys["rope_scaling"] = scaling
    if names.sliding_theta:
        keys[names.sliding_theta] = model.sliding_theta
    if names.by_layer:
        plain = {"rope_type": "default", "rope_theta": model.sliding_theta}
        return {**keys, "rope_parameters": {FULL: parameters, SLIDING: plain}}
    return {**keys, "rope_parameters": parameters}


def window_keys(model: Model) -> dict[str, object]:
    """Which layers have a window; nothing where the family's class knows of none."""
    names = model.architecture.hugging_face.windows
    if names is None:
        return {}
    keys: dict[str, object] = {"sliding_window": model.sliding_window}
    if names.switched:
        keys["use_sliding_window"] = model.sliding_window is not None
    if names.by_layer:
        if names.switched:
            keys["max_window_layers"] = model.num_layers
        kinds = (SLIDING if model.slides(i) else FULL for i in range(model.num_layers))
        keys["layer_types"] = list(kinds)
    return keys


def window_problems(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Layers whose window is another than the job's."""
    try:
        there = list(_windows(config, model))
    except (TypeError, ValueError, LookupError, ArithmeticError):
        yield Problem("its keys of sliding windows make no sense")
        return
    here = [model.window(layer) for layer in range(model.num_layers)]
    if there == here:
        return
    size = max(there)
    if not size:
        hint = f"leave {setting_of(model, 'sliding_window')} out"
    else:
        # of so many layers the last sees all
        every = there.index(0) + 1 if 0 in there else 0
        pattern = [size if not every or (i + 1) % every else 0 for i in range(len(there))]
        hint = (
            f"set {setting_of(model, 'sliding_window')} = {size} and sliding_window_pattern ="
            f" {every}"
        )
        if pattern != there:
            hint = "trainkit has windows in all layers, or in all but the last of every so many"
    yield Problem(
        f"the windows of its layers are {_runs(there)} there, {_runs(here)} for this job",
        hint=hint,
    )


def _windows(config: Mapping[str, Any], model: Model) -> Iterator[int]:
    """Tokens that a token sees in each layer, as transformers reads it; 0: all."""
    names = model.architecture.hugging_face.windows
    size = config.get("sliding_window", names.default if names else None)
    off = names is not None and names.switched and not config.get("use_sliding_window")
    kinds = config.get("layer_types") if names and names.by_layer else None
    by_number = names is not None and names.switched and names.by_layer
    first = config.get("max_window_layers", 28) if by_number else 0
    every = config.get("sliding_window_pattern", model.architecture.sliding_window_pattern)
    for layer in range(model.num_layers):
        if kinds is not None:
            slides = {FULL: False, SLIDING: True}[kinds[layer]]
        else:
            slides = layer >= first and (not every or bool((layer + 1) % every))
        yield int(size) if slides and size and not off else 0


def _runs(windows: list[int]) -> str:
    """Windows of layers, those of one kind that follow each other together: 3 x 4096, 1 x all."""
    runs = [(size, len(list(same))) for size, same in groupby(windows)]
    words = [f"{count} x {size or 'all'}" for size, count in runs[:4]]
    return ", ".join([*words, "..."] if len(runs) > 4 else words)


def _stretch(scaling: RopeScaling) -> dict[str, object]:
    return scaling.model_dump(include=set(STRETCH_KEYS[scaling.type]))


def position_problems(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """What is wrong about rotary positions: length, theta, part and stretching."""
    names = model.architecture.hugging_face.rotary
    if names is None:
        return
    yield from _length_problems(config.get("max_position_embeddings"), model)
    try:
        rope, theta, sliding_theta = _rope_of(config, names)
    except (TypeError, AttributeError):
        there = config.get("rope_scaling") or config.get("rope_parameters")
        yield Problem(f"its rotary positions cannot be said in a job: {there!r}")
        return
    if theta != model.theta:
        yield Problem(
            f"theta of its rotary positions is {theta}, {model.theta} for this job",
            hint=f"set {setting_of(model, 'rotary_base')} = {theta}",
        )
    if names.by_layer and sliding_theta != model.sliding_theta:
        yield Problem(
            f"theta of its rotary positions is {sliding_theta} in layers with a window,"
            f" {model.sliding_theta} for this job",
            hint=f"set {setting_of(model, 'sliding_rotary_base')} = {sliding_theta}",
        )
    yield from _fraction_problems(rope, config, model, names)
    yield from _stretch_problems(rope, config, model)


def _rope_of(
    config: Mapping[str, Any], names: RotaryKeys
) -> tuple[Mapping[str, Any], object, object]:
    """What is said of rotary positions in layers without a window, and both thetas.

    Raises TypeError, AttributeError: it makes no sense, or layers with a window are stretched.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    sliding: Mapping[str, Any] = {}
    rope = parameters
    if names.by_layer:
        rope, sliding = (parameters.get(kind) or {} for kind in (FULL, SLIDING))
        if sliding.get("rope_type", "default") != "default":
            raise TypeError(sliding)
    if stretching := config.get("rope_scaling"):
        rope = stretching
    if any(isinstance(value, dict) for value in rope.values()):
        raise TypeError(rope)
    theta = rope.get("rope_theta", config.get(names.theta, names.default))
    usual = config.get(names.sliding_theta or names.theta, names.sliding_default)
    return rope, theta, sliding.get("rope_theta", usual)


def _length_problems(longest: object, model: Model) -> Iterator[Problem]:
    if longest is None:
        longest = MAX_POSITIONS
    if type(longest) is not int:
        yield Problem(f"its max_position_embeddings makes no sense: {longest!r}")
    elif model.seq_length > longest:
        hint = (
            "shorten seq_length; to go beyond, copy the folder, raise max_position_embeddings in"
            " its config.json and name the copy"
        )
        yield Problem(
            f"it reads {longest} tokens (max_position_embeddings), the job's samples have"
            f" {model.seq_length}",
            hint=hint,
        )


def _fraction_problems(
    rope: Mapping[str, Any], config: Mapping[str, Any], model: Model, names: RotaryKeys
) -> Iterator[Problem]:
    usual = model.architecture.rotary_percent
    part = rope.get("partial_rotary_factor", config.get(names.fraction, usual))
    is_number = isinstance(part, int) or (isinstance(part, float) and math.isfinite(part))
    whole = model.head_size if model.mla is None else model.mla.qk_pos_emb_head_dim
    if is_number and int(whole * part) == model.rotary_channels:
        return
    if "rotary_percent" in model.architecture.settings:
        hint = f"set {setting_of(model, 'rotary_percent')} = {part}"
    else:
        hint = "trainkit has no such model"
    yield Problem(
        f"{part} of a head's channels turn there ({names.fraction}), {model.rotary_channels} of"
        f" {model.head_size} for this job",
        hint=hint,
    )


def _stretch_problems(
    rope: Mapping[str, Any], config: Mapping[str, Any], model: Model
) -> Iterator[Problem]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    stretches = "rope_scaling" in model.architecture.settings
    if kind not in ("default", "linear", "llama3", "yarn") or (kind != "default" and not stretches):
        yield Problem(
            f"its rotary positions are stretched by {kind!r}, which family {model.family!r} does"
            " not have"
        )
        return
    here: dict[str, object] = {"type": "default"}
    if model.rope_scaling is not None:
        here = {"type": model.rope_scaling.type, **_stretch(model.rope_scaling)}
    there = {"type": kind, **{key: rope.get(key) for key in STRETCH_KEYS.get(kind, ("factor",))}}
    usually = {
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    missing = [key for key, value in there.items() if value is None and key in usually]
    there |= {key: usually[key] for key in missing}
    if there == here:
        return
    setting = setting_of(model, "rope_scaling")
    if kind == "default":
        hint = f"leave {setting} out"
    else:
        said = {key: value for key, value in there.items() if value is not None}
        inline = ", ".join(f"{key} = {toml_value(value)}" for key, value in said.items())
        hint = f"set {setting} = {{ {inline} }}"
    yield Problem(f"its rotary positions are stretched as {there}, {here} for this job", hint=hint)
