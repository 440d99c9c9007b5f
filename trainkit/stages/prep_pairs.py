"""Ready-made .bin/.idx pairs and blends of datasets: what prep-data has to do for them."""

from __future__ import annotations

from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.order.resolve_pairs import prefixes_of
from trainkit.data.sources import SOURCES, download_notice, fetch_units
from trainkit.data.unit_specs import CheckSpec
from trainkit.stages.contract import Need, Unit
from trainkit.stages.dataset_units import (
    DatasetUnits,
    fetch_unit,
    module_argv,
    tokenizer_settings,
)


class PairsUnits(DatasetUnits):
    """Ready-made pairs: they are fetched if urls name them, checked, and described; of a blend,
    whose pairs are its parts', only described."""

    def settings(self) -> dict[str, object]:
        own = self.dataset.model_dump(
            mode="json", include={"urls", "endpoint", "sha256"}, exclude_none=True
        )
        return {
            **tokenizer_settings(self.tokenizer),
            **{f"datasets.{self.dataset.name}.{key}": value for key, value in own.items() if value},
        }

    def need(self, *, force: bool) -> Need:
        corpus = self.folder.corpus
        shards = SOURCES["indexed"].shards(self.dataset, corpus, retry=self.patience)
        fetched = [fetch_unit(fetch) for fetch in fetch_units(self.dataset, corpus, shards)]
        prefixes = [shard.path.with_suffix("") for shard in shards if shard.path.suffix == ".idx"]
        if self.dataset.source == "indexed" and not self.dataset.urls:
            prefixes = prefixes_of(self.dataset, self.folder.root)
        make = self._tokenizer_unit((), ())
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        spec = CheckSpec(
            self.dataset.name,
            self.folder.tokenizer,
            self.tokenizer.eod_token,
            tuple(prefixes),
            self.folder.manifest,
        )
        check = Unit(
            "check",
            module_argv("trainkit.data.tokenize.check_worker"),
            spec.to_json(),
            (self.folder.manifest,),
            (make.name, *(unit.name for unit in fetched)),
        )
        inputs = self._given_files() if fetched else [*files, *self._given_files()]
        outputs = [
            self.folder.tokenizer,
            self.folder.manifest,
            *self._fetched_files(),
            *(files if fetched else ()),
        ]
        units = (*fetched, *self.tokenizer_fetches, make, check)
        return self._need(
            inputs, outputs, units, announcement=download_notice(self.dataset, corpus, shards)
        )
