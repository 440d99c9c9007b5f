"""[models.X.rope_scaling]: rotary positions beyond the length of a first training."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from trainkit.jobs.table import Table, wrong


class RopeScaling(Table):
    """How rotary positions are stretched beyond the length a model was first trained on. Keys
    are Hugging Face's."""

    type: Literal["linear", "llama3", "yarn"] = Field(
        description=(
            "linear: every position divided by factor; llama3, yarn: only low frequencies, as in"
            " Llama 3.1 or by Peng et al. 2023"
        )
    )
    factor: float = Field(gt=1, description="how many times longer")
    low_freq_factor: float = Field(
        1.0,
        gt=0,
        description=(
            "llama3: wavelengths above original_max_position_embeddings / this are divided in full"
        ),
    )
    high_freq_factor: float = Field(
        4.0,
        gt=0,
        description=(
            "llama3: wavelengths below original_max_position_embeddings / this stay as they are"
        ),
    )
    original_max_position_embeddings: int = Field(
        8192, ge=1, description="llama3, yarn: the length before stretching"
    )
    beta_fast: float = Field(
        32.0, gt=0, description="yarn: channels that turn more often in that length stay"
    )
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: channels that turn less often in that length are divided"
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description=(
            "yarn: cosines and sines are multiplied by it; by default mscale's 0.1 m ln(factor) + 1"
            " over that of mscale_all_dim, without these 0.1 ln(factor) + 1"
        ),
    )
    mscale: float | None = Field(None, gt=0, description="yarn: m of attention_factor's numerator")
    mscale_all_dim: float | None = Field(
        None,
        gt=0,
        description=("yarn: m of its denominator; with mla, scores are multiplied by that squared"),
    )
    truncate: bool = Field(
        True,
        description="yarn: channels between those that stay and those divided are rounded to whole",
    )

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise wrong(
                "high_freq_factor",
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor"
                f" {self.low_freq_factor}",
            )
        if self.beta_fast <= self.beta_slow:
            raise wrong(
                "beta_fast", f"beta_fast {self.beta_fast} is not above beta_slow {self.beta_slow}"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise wrong("mscale", "mscale and mscale_all_dim go together")
        return self

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied with. YaRN: Peng et al. 2023, arXiv:2309.00071,
        section 3.4."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._at(self.mscale) / self._at(self.mscale_all_dim)
        return self._at(1.0)

    @property
    def score_factor(self) -> float:
        """What scores of attention by latents are multiplied with (DeepSeek-V3's published code,
        inference/model.py)."""
        if self.type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._at(self.mscale_all_dim) ** 2

    def _at(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1
