"""The steps that look at one document: a file for each, and who makes it from its table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainkit import _index
from trainkit.data.curate.contract import CurationStep
from trainkit.data.curate.steps.benchmarks import BenchmarkFilter
from trainkit.data.curate.steps.c4 import C4Filter
from trainkit.data.curate.steps.length import LengthFilter
from trainkit.data.curate.steps.models import LanguageFilter, ScoreFilter
from trainkit.data.curate.steps.own_function import OwnFunction
from trainkit.data.curate.steps.pii import PiiMask
from trainkit.data.curate.steps.quality import RuleFilter
from trainkit.data.curate.steps.sample import Sampler
from trainkit.data.curate.steps.url import UrlFilter

# (table, language of words) -> step
STEPS: dict[str, Callable[[Any, str], CurationStep]] = {
    "url": UrlFilter,
    "language": LanguageFilter,
    "gopher-quality": partial(RuleFilter, _index.GopherQuality),
    "gopher-repetition": partial(RuleFilter, _index.GopherRepetition),
    "c4": C4Filter,
    "fineweb": partial(RuleFilter, _index.FinewebQuality),
    "score": ScoreFilter,
    "pii": PiiMask,
    "length": LengthFilter,
    "decontaminate": BenchmarkFilter,
    "sample": Sampler,
    "function": OwnFunction,
}
