"""Positions in config.json.

Rotary positions stand in keys of their own up to transformers 4 (rope_theta, rope_scaling;
rotary_pct, rotary_emb_base) and in `rope_parameters` since 5, which reads the old ones too: both
are written, either is read. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.base.errors import Problem
from trainkit.families.contract import RotaryKeys
from trainkit.jobs.schema import Model, RopeScaling

# transformers' values where a key is absent or null
THETA = 10000.0
MAX_POSITIONS = 2048


def setting_of(model: Model, key: str) -> str:
    """The name of a key of the job's model, to be named in a message."""
    if model.name:
        return f"models.{model.name}.{key}"
    return f"model.{key}"


def toml_value(value: object) -> str:
    """A value as it is written in jobs.toml."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def rotary_keys(model: Model) -> dict[str, object]:
    """Rotary positions in the keys of transformers 4 and of 5; none where positions are learned."""
    names = model.architecture.hugging_face.rotary
    if names is None:
        return {}
    settings = model.architecture.settings
    theta = model.rotary_base or THETA
    keys: dict[str, object] = {"max_position_embeddings": model.positions}
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if "rotary_percent" in settings:
        keys[names.fraction] = model.rotary_fraction
        parameters["partial_rotary_factor"] = model.rotary_fraction
    keys[names.theta] = theta
    if "rope_scaling" in settings:
        scaling = None
        if model.rope_scaling is not None:
            scaling = {"rope_type": model.rope_scaling.type, **_stretch(model.rope_scaling)}
            parameters = {**scaling, "rope_theta": theta}
        keys["rope_scaling"] = scaling
    return {**keys, "rope_parameters": parameters}


def _stretch(scaling: RopeScaling) -> dict[str, object]:
    return scaling.model_dump(include=set(_stretch_keys(scaling.type)))


def _stretch_keys(kind: object) -> tuple[str, ...]:
    """What is said of a stretching besides its type."""
    if kind == "default":
        return ()
    if kind == "llama3":
        llama3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return ("factor", *llama3)
    return ("factor",)


def position_problems(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """What is wrong about rotary positions: length, theta, part and stretching."""
    names = model.architecture.hugging_face.rotary
    if names is None:
        return
    yield from _length_problems(config.get("max_position_embeddings"), model)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        yield Problem(f"its rotary positions cannot be said in a job: {rope!r}")
        return
    theta = rope.get("rope_theta", config.get(names.theta, THETA))
    here = model.rotary_base or THETA
    if theta != here:
        yield Problem(
            f"theta of its rotary positions is {theta}, {here} for this job",
            hint=f"set {setting_of(model, 'rotary_base')} = {theta}",
        )
    yield from _fraction_problems(rope, config, model, names)
    yield from _stretch_problems(rope, config, model)


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
    if is_number and int(model.head_size * part) == model.rotary_channels:
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
    if kind not in ("default", "linear", "llama3") or (kind != "default" and not stretches):
        yield Problem(
            f"its rotary positions are stretched by {kind!r}, which family {model.family!r} does"
            " not have"
        )
        return
    here: dict[str, object] = {"type": "default"}
    if model.rope_scaling is not None:
        here = {"type": model.rope_scaling.type, **_stretch(model.rope_scaling)}
    there = {"type": kind, **{key: rope.get(key) for key in _stretch_keys(kind)}}
    if kind == "llama3" and there["original_max_position_embeddings"] is None:
        there["original_max_position_embeddings"] = config.get("max_position_embeddings")
    if there == here:
        return
    setting = setting_of(model, "rope_scaling")
    if kind == "default":
        hint = f"leave {setting} out"
    else:
        inline = ", ".join(f"{key} = {toml_value(value)}" for key, value in there.items())
        hint = f"set {setting} = {{ {inline} }}"
    yield Problem(f"its rotary positions are stretched as {there}, {here} for this job", hint=hint)
