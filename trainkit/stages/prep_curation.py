"""Datasets that are curated: the units that take the text through its steps, before others make
tokens of what is left.

Steps that look at one document are one pass over each shard, up to a step that compares all
documents; what that finds is left out at the beginning of the next pass.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.data.curate.funnel import CURATION, SCHEMA
from trainkit.data.curate.specs import (
    ClusterSpec,
    FilterSpec,
    JoinSpec,
    KeysSpec,
    NumberSpec,
    SummaryShard,
    SummarySpec,
)
from trainkit.data.curate.step_files import lacking_of, step_files
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.fetch.retry import FetchRetryPolicy
from trainkit.data.sources import Shard, download_notice
from trainkit.data.text.web_archives import lacking_for
from trainkit.data.unit_specs import ReadingSettings
from trainkit.jobs.curation import Curation, DecontaminateStep, ExactStep, MinHashStep, Step
from trainkit.jobs.schema import Dataset
from trainkit.stages.contract import Need, Unit
from trainkit.stages.dataset_units import module_argv
from trainkit.stages.prep_text import TextUnits, origin_of
from trainkit.stages.stamps import read_stamp, unit_stamp_path

FILTER_WORKER = "trainkit.data.curate.filter_worker"
DUPLICATES_WORKER = "trainkit.data.curate.duplicates_worker"
PARTS = 16  # units that join the keys of an exact comparison
KEYS_SIZE = 100  # bytes of text for one of the keys that are joined, about
# what curation writes below its folder, beside curation.json
WRITTEN = ("*.jsonl.zst*", "*.parquet*", "pass-*/*", "compared-*/*", "dropped/*/*", "rejects/*")
NAME = "{}.curated"  # of the need; no tokenizer has a dot


def needs_of_curated(
    dataset: Dataset, root: Path, stamps: Path, *, force: bool, patience: FetchRetryPolicy
) -> list[Need]:
    """What it takes to have the tokens of a dataset that is curated; arguments as
    `needs_of_dataset`."""
    tokenizer = dataset.tokenizer
    assert tokenizer is not None, "the schema wants one for what is curated"
    curating = CurationUnits(dataset, tokenizer, root, stamps, patience)
    tokens = CuratedTextUnits(dataset, tokenizer, root, stamps, patience)
    if not force:
        made = curating.as_made(), tokens.as_made()
        if made[0] and made[1]:
            return [made[0], made[1]]
    for given in tokens.given_files():
        if not given.is_file():  # the unit that reads it comes last
            raise ConfigError(
                f"tokenizers.{tokenizer.name}: {given} is not there",
                exit=Exit.STAGE_FAILED,
                hint="it is asked for before the text is curated, which may take long",
            )
    first = curating.need(force=force)
    tokens.sources = curating.shards
    return [first, tokens.need(force=force)]


@dataclass
class CurationPass:
    """Steps over one document each, and the comparison that ends them, if one does."""

    steps: list[tuple[int, Step]] = field(default_factory=list)
    comparison: tuple[int, ExactStep | MinHashStep] | None = None

    @cached_property
    def tables(self) -> tuple[dict[str, object], ...]:
        """Of the steps, the same for all shards."""
        return tuple(_table(_with_files(step)) for _, step in self.steps)


def passes_of(curation: Curation) -> list[CurationPass]:
    """The steps as passes over the text, each step with its number."""
    passes = [CurationPass()]
    for number, step in enumerate(curation.all_steps()):
        if isinstance(step, (ExactStep, MinHashStep)):
            passes[-1].comparison = (number, step)
            passes.append(CurationPass())
        else:
            passes[-1].steps.append((number, step))
    return passes


def _table(step: Step) -> dict[str, object]:
    return step.model_dump(mode="json")


def _with_files(step: Step) -> Step:
    """With the files that its patterns match now: one more is another step."""
    if not isinstance(step, DecontaminateStep):
        return step
    return step.model_copy(update={"benchmarks": tuple(map(glob.escape, step_files(step)))})


def _curation_of(dataset: Dataset) -> Curation:
    """The table of a dataset that is curated."""
    assert dataset.curate is not None
    return dataset.curate


def _output(curation: Curation) -> str:
    return {"jsonl": ".jsonl.zst", "parquet": ".parquet"}[curation.output]


class CuratedTextUnits(TextUnits):
    """Tokens of what curation has written.

    Attributes:
        sources: the shards as they were published.
    """

    sources: Sequence[Shard] = ()

    def _find_shards(self, stamp: Mapping[str, Any]) -> tuple[list[Unit], dict[str, Unit]]:
        ending = _output(_curation_of(self.dataset))
        self.reading = ReadingSettings(self.dataset.text_key, max_document_bytes=2**40)
        self.curation = self.folder.curated / CURATION
        self._published = {shard.name: shard for shard in self.sources}
        self.shards = [
            dataclasses.replace(
                shard, path=self.folder.curated / f"{shard.name}{ending}", recipe=None
            )
            for shard in self.sources
        ]
        return [], {}

    def _origin(self, shard: Shard) -> dict[str, object]:
        return origin_of(self._published[shard.name], self.folder.root)

    def _declared(self) -> dict[str, int]:
        return {}  # of the text as it was read: see SummarySpec


class CurationUnits(TextUnits):
    """From published text to text that is worth training on."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.name = NAME.format(self.dataset.name)

    def settings(self) -> dict[str, object]:
        return {
            key: value
            for key, value in super().settings().items()
            if not key.startswith("tokenizers.")
        }

    def left_of(self, stamp: Mapping[str, Any]) -> list[Path]:
        return []

    def need(self, *, force: bool) -> Need:
        curation = _curation_of(self.dataset)
        stamp = {} if force else read_stamp(self.stamps / f"{self.name}.json") or {}
        earlier, before = self._find_shards(stamp)
        passes = passes_of(curation)
        units: list[Unit] = []
        comparison = _Comparison()
        keys: dict[str, tuple[Path, ...]] = {}
        for number, each in enumerate(passes):
            units += [
                self._filter(shard, before.get(shard.name), passes, number, comparison)
                for shard in self.shards
            ]
            if each.comparison is not None:
                comparison = self._compare(number, *each.comparison)
                keys[str(each.comparison[0])] = tuple(comparison.keys.values())
                units += comparison.units
        last = self._summary(units, len(passes), keys)
        written = [self._written(shard, passes, len(passes) - 1) for shard in self.shards]
        need = self._need(
            [*(shard.path for shard in self.shards if not shard.recipe), *self._beside()],
            [*written, *last.outputs],
            (*earlier, *units, last),
            self._left_over(units),
            announcement=download_notice(self.dataset, self.folder.corpus, self.shards),
            memory={"names": {str(shard.path): shard.name for shard in self.shards}},
        )
        lacking = need.lacking or lacking_of(curation)
        lacking = lacking or lacking_for(shard.path.name for shard in self.shards)
        return dataclasses.replace(need, lacking=lacking)

    def _left_over(self, units: Sequence[Unit]) -> list[Path]:
        """Files of former steps, shards and writers that were killed."""
        folder = self.folder.curated
        kept = {path for unit in units for path in unit.outputs}
        kept |= {folder / f"rejects/{shard.name}.jsonl" for shard in self.shards}
        found = (path for pattern in WRITTEN for path in folder.glob(pattern) if path.is_file())
        return sorted(set(found) - kept)

    def as_made(self) -> Need | None:
        made = super().as_made()
        if made is None or set(made.inputs) != set(self._beside()):  # no shard is an input
            return None
        return made

    def _beside(self) -> list[Path]:
        """Files from outside that steps read beside the shards, each once."""
        steps = _curation_of(self.dataset).all_steps()
        files = (path for s in steps for path in (*map(Path, step_files(s)), *self._others(s)))
        return list(dict.fromkeys(files))

    def _written(self, shard: Shard, passes: Sequence[CurationPass], number: int) -> Path:
        """What a pass makes of a shard."""
        if number == len(passes) - 1:
            return self.folder.curated / f"{shard.name}{_output(_curation_of(self.dataset))}"
        return self.folder.curated / f"pass-{number}/{shard.name}.jsonl.zst"

    def _filter(
        self,
        shard: Shard,
        before: Unit | None,
        passes: Sequence[CurationPass],
        number: int,
        comparison: _Comparison,
    ) -> Unit:
        """What takes a shard through one pass; `comparison`: what ended the one before."""
        recipe = shard.recipe if isinstance(shard.recipe, FetchRecipe) else None
        after: tuple[str, ...] = (before.name,) if before else ()
        reads = shard.path
        if number:
            reads = self._written(shard, passes, number - 1)
            recipe = None
            after = comparison.after
        spec = FilterSpec(
            shard.name,
            reads,
            None if before else recipe,
            shard.size,
            self.reading,
            passes[number].tables,
            tuple(place for place, _ in passes[number].steps),
            _curation_of(self.dataset).words,
            self._written(shard, passes, number),
            self.folder.curated / f"dropped/pass-{number}/{shard.name}.jsonl.zst",
            self.folder.curated / f"rejects/{shard.name}.jsonl",
            comparison.keys.get(shard.name),
            comparison.numbers,
            comparison.duplicates,
            comparison.table,
            comparison.number,
        )
        return Unit(
            f"curate{number}-{shard.name}",
            module_argv(FILTER_WORKER),
            spec.to_json(),
            (spec.output, spec.dropped),
            after,
            shard.size,
            several=True,
        )

    def _compare(self, number: int, place: int, step: ExactStep | MinHashStep) -> _Comparison:
        """What finds duplicates among the documents that a pass has left."""
        folder = self.folder.curated / f"compared-{number}"
        passes = passes_of(_curation_of(self.dataset))
        keys: dict[str, Path] = {}
        units = []
        for shard in self.shards:
            path = keys[shard.name] = folder / f"{shard.name}.keys"
            spec = KeysSpec(
                self._written(shard, passes, number),
                self.reading.text_key,
                _table(step),
                _curation_of(self.dataset).words,
                path,
            )
            units.append(
                _duplicates_unit(
                    f"keys{number}-{shard.name}",
                    spec.to_json(),
                    path,
                    (f"curate{number}-{shard.name}",),
                    shard.size // 2,
                )
            )
        numbers = folder / "numbers.json"
        counted = NumberSpec(tuple(self._others(step)), tuple(keys.values()), numbers)
        after = tuple(unit.name for unit in units)
        units.append(_duplicates_unit(f"number{number}", counted.to_json(), numbers, after))
        joins = self._joins(number, step, numbers)
        units += joins
        found = tuple(path for unit in joins for path in unit.outputs)
        if isinstance(step, MinHashStep):
            path = folder / "duplicates"
            clustered = ClusterSpec(numbers, found, path)
            units.append(
                _duplicates_unit(
                    f"cluster{number}",
                    clustered.to_json(),
                    path,
                    tuple(unit.name for unit in joins),
                )
            )
            joins = units[-1:]
            found = (path,)
        return _Comparison(
            units, tuple(unit.name for unit in joins), keys, numbers, found, _table(step), place
        )

    def _joins(self, number: int, step: ExactStep | MinHashStep, numbers: Path) -> list[Unit]:
        """What finds equal keys, in parts that need not wait for one another."""
        folder = self.folder.curated / f"compared-{number}"
        minhash = isinstance(step, MinHashStep)
        if isinstance(step, MinHashStep):
            parts = [(band, 0, 1) for band in range(step.bands)]
        else:
            parts = [(0, part, PARTS) for part in range(PARTS)]
        size = sum(shard.size for shard in self.shards) // KEYS_SIZE // len(parts)
        units = []
        for band, part, of in parts:
            name = f"{band if minhash else part:03d}"
            path = folder / (f"band-{name}.pairs" if minhash else f"part-{name}.duplicates")
            spec = JoinSpec(numbers, band, part, of, minhash, path)
            after = (f"number{number}",)
            units.append(
                _duplicates_unit(f"join{number}-{name}", spec.to_json(), path, after, size)
            )
        return units

    def _others(self, step: Step) -> list[Path]:
        """Key files of the datasets that a step compares with. Raises ConfigError (exit 6): one
        is not prepared, or by another step."""
        found = []
        for name in getattr(step, "against", ()):
            path = self.folder.root / "data" / name / "curated" / CURATION
            hint = f"invoke prep-data --dataset {name}, with the same step"
            try:
                value = read_json(path)
            except (OSError, ValueError):
                value = {}
            mine = {**_table(step), "against": []}
            same = [
                each
                for each in value.get("steps", [])
                if value.get("schema") == SCHEMA
                and {**each["table"], "against": []} == mine
                and value["language"] == _curation_of(self.dataset).words
            ]
            if not same:
                raise ConfigError(
                    f"datasets.{self.dataset.name}: {step.step} against {name!r}, but {path} does"
                    " not say that this step was done there",
                    exit=Exit.STAGE_FAILED,
                    hint=hint,
                )
            found += [self.folder.root / each for each in same[0]["keys"]]
        return found

    def _summary(
        self, units: Sequence[Unit], passes: int, keys: Mapping[str, tuple[Path, ...]]
    ) -> Unit:
        curation = _curation_of(self.dataset)
        path = self.folder.curated / CURATION
        stamps = tuple(
            tuple(
                unit_stamp_path(self.stamps, self.name, f"curate{number}-{shard.name}")
                for shard in self.shards
            )
            for number in range(passes)
        )
        spec = SummarySpec(
            self.dataset.name,
            self.folder.root,
            tuple(_table(step) for step in curation.all_steps()),
            curation.words,
            stamps,
            tuple(
                SummaryShard(shard.name, origin_of(shard, self.folder.root))
                for shard in self.shards
            ),
            keys,
            self.dataset.documents,
            path,
        )
        return Unit(
            "summary",
            module_argv(FILTER_WORKER),
            spec.to_json(),
            (path,),
            tuple(unit.name for unit in units if unit.name.startswith("curate")),
        )


@dataclass
class _Comparison:
    """What ends a pass: its units and what the next pass reads.

    Attributes:
        after: names of the units that the next pass waits for.
        keys: key files by the shards' names.
    """

    units: list[Unit] = field(default_factory=list)
    after: tuple[str, ...] = ()
    keys: dict[str, Path] = field(default_factory=dict)
    numbers: Path | None = None
    duplicates: tuple[Path, ...] = ()
    table: dict[str, object] | None = None
    number: int = 0


def _duplicates_unit(
    name: str, spec: Mapping[str, object], path: Path, after: tuple[str, ...], size: int = 1
) -> Unit:
    return Unit(
        name, module_argv(DUPLICATES_WORKER), spec, (path,), after, max(1, size), several=True
    )
