"""Rules between keys of [models.X]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.families.contract import Family
from trainkit.jobs.table import needs, wrong


def check_parametrization(said: Mapping[str, Any], family: Family, head_size: int) -> None:
    """Rules of muP (Yang et al. 2022, arXiv:2203.03466), `said` of a model of a family. Raises an
    error of a rule."""
    mup = said["parametrization"] == "mup"
    if mup and said["mup_base_hidden_size"] is None:
        raise needs(
            "mup_base_hidden_size",
            "parametrization = 'mup' needs mup_base_hidden_size, the width at which the"
            " learning rate was tuned",
        )
    for key in ("mup_base_hidden_size", "mup_base_kv_channels"):
        if said[key] is not None and not mup:
            raise wrong(key, f"{key} is for parametrization = 'mup'")
    if mup and family.embedding_scale and said["embedding_scale"] is None:
        raise needs(
            "embedding_scale",
            f"embeddings of family {family.name!r} are multiplied by what follows the width;"
            " under muP set embedding_scale, the same number at every width",
        )
    for key in ("init_method", "output_layer_init_method"):
        if mup and (method := said[key]) in ("small_init", "wang_init"):
            raise wrong(
                key,
                f"{key} = {method!r} follows the width by itself; under muP set normal or"
                " scaled, with init_method_std",
            )
    base = said["mup_base_kv_channels"]
    if base is not None and (head_size**2 % base or said["query_pre_attn_scalar"]):
        raise wrong(
            "mup_base_kv_channels",
            f"mup_base_kv_channels {base} sets query_pre_attn_scalar to"
            f" {head_size}^2 / {base}: that must be whole, and not be given, too",
        )


def check_windows(said: Mapping[str, Any], family: Family) -> None:
    """Keys of windows that say nothing, or nothing good, without another; `said` of a model of a
    family. Raises an error of a rule."""
    window = said["sliding_window"]
    if window is None:
        if family.sliding_window_pattern:
            raise wrong(
                "family", f"family {family.name!r} has layers with a window: set sliding_window"
            )
        for key in ("sliding_window_pattern", "sliding_rotary_base"):
            if said[key] is not None:
                raise wrong(key, f"{key} without sliding_window: no layer has a window")
    elif window > said["seq_length"]:
        raise wrong(
            "sliding_window",
            f"sliding_window {window} is longer than seq_length {said['seq_length']}: no layer"
            " would hide anything",
        )
