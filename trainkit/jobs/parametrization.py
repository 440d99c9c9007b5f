"""Rules of muP between keys of [models.X] (Yang et al. 2022, arXiv:2203.03466)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.jobs.table import needs, wrong

if TYPE_CHECKING:
    from trainkit.jobs.models import Model


def check_parametrization(model: Model) -> None:
    """Raises an error of a rule."""
    mup = model.parametrization == "mup"
    if mup and model.mup_base_hidden_size is None:
        raise needs(
            "mup_base_hidden_size",
            "parametrization = 'mup' needs mup_base_hidden_size, the width at which the"
            " learning rate was tuned",
        )
    for key in ("mup_base_hidden_size", "mup_base_kv_channels"):
        if getattr(model, key) is not None and not mup:
            raise wrong(key, f"{key} is for parametrization = 'mup'")
    if mup and model.architecture.embedding_scale and model.embedding_scale is None:
        raise needs(
            "embedding_scale",
            f"embeddings of family {model.family!r} are multiplied by what follows the width;"
            " under muP set embedding_scale, the same number at every width",
        )
    for key in ("init_method", "output_layer_init_method"):
        if mup and (method := getattr(model, key)) in ("small_init", "wang_init"):
            raise wrong(
                key,
                f"{key} = {method!r} follows the width by itself; under muP set normal or"
                " scaled, with init_method_std",
            )
    base = model.mup_base_kv_channels
    if base is not None and (model.head_size**2 % base or model.query_pre_attn_scalar):
        raise wrong(
            "mup_base_kv_channels",
            f"mup_base_kv_channels {base} sets query_pre_attn_scalar to"
            f" {model.head_size}^2 / {base}: that must be whole, and not be given, too",
        )
