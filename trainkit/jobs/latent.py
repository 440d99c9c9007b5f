"""[models.X.mla]: attention by latents (DeepSeek-V2, arXiv:2405.04434, section 2.1). Key names are
Megatron's."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from trainkit.families.contract import Family
from trainkit.jobs.table import Table, needs, wrong


class Latent(Table):
    """Queries, and keys with values, are made of narrow latents of a token. A head's queries and
    keys have channels that turn with the position, and others; the keys' turning ones are the
    same in all heads."""

    q_lora_rank: int | None = Field(
        None, ge=1, description="width of the latent of queries; without it there is none"
    )
    kv_lora_rank: int = Field(ge=1, description="width of the latent of keys and values")
    qk_head_dim: int = Field(
        ge=1, description="channels of a head's queries and keys that do not turn"
    )
    qk_pos_emb_head_dim: int = Field(
        ge=2, multiple_of=2, description="those that turn with the position"
    )
    v_head_dim: int = Field(ge=1, description="channels of a head's values")

    @model_validator(mode="after")
    def _fits(self) -> Latent:
        if self.v_head_dim > self.head_size:
            raise wrong(
                "v_head_dim",
                f"v_head_dim {self.v_head_dim} is above qk_head_dim + qk_pos_emb_head_dim ="
                f" {self.head_size}: values are computed in heads as wide as queries",
            )
        return self

    @property
    def head_size(self) -> int:
        """Channels of a head's queries, and of its keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def check_latent(said: Mapping[str, object], family: Family) -> None:
    """Rules between [models.X.mla] and the other keys, `said` of a model of a family. Raises an
    error of a rule."""
    if said["mla"] is None:
        if "mla" in family.settings:
            raise needs(
                "mla", f"attention of family {family.name!r} is by latents: write [models.X.mla]"
            )
        return
    for key in ("kv_channels", "qk_norm", "add_qkv_bias"):
        if said[key]:
            raise wrong(key, f"{key} is not for attention by latents, which [models.X.mla] shapes")
