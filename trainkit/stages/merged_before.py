"""What is still there of a dataset that was merged before: shards that need not be made again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.files import read_json
from trainkit.data.indexed.manifest import ranges_path
from trainkit.data.indexed.paths import DataFolder, bin_path, idx_path, read_manifest
from trainkit.data.sources import Shard
from trainkit.data.unit_specs import SliceBounds
from trainkit.stages.stamps import file_identity, read_stamp


def with_former_names(shards: Sequence[Shard], names: Mapping[str, str]) -> list[Shard]:
    """The shards under the names that their files had before; others get numbers that were not
    given yet. At first they are numbered in order."""
    if not names:
        return list(shards)
    highest = max(map(int, names.values()))
    free = itertools.count(highest + 1)
    return [
        dataclasses.replace(shard, name=names.get(str(shard.path)) or f"{next(free):05d}")
        for shard in shards
    ]


class MergedBefore:
    """The merged pair that was made before, if it still lies there as it was made: the shards it
    was made of need not be made again.

    Args:
        folder: the dataset's files.
        stamp: of the stage, finished or not.
        units: the folder of the units' stamps.

    Attributes:
        ranges: of each shard by name: first sequence, sequences, first document, documents.
        identity: of .bin and .idx.
    """

    def __init__(self, folder: DataFolder, stamp: Mapping[str, Any], units: Path) -> None:
        self.ranges: dict[str, SliceBounds] = {}
        self.identity: list[object] = []
        if folder.dataset.shuffle_documents:
            return
        shards = _of_manifest(folder, stamp, units) or _of_unfinished(folder.prefix)
        if not shards:
            return
        self.identity = [
            file_identity(path) for path in (bin_path(folder.prefix), idx_path(folder.prefix))
        ]
        sequence = 0
        document = 0
        for name, sequences, documents in shards:
            self.ranges[name] = (sequence, sequences, document, documents)
            sequence = sequence + sequences
            document = document + documents


def _of_manifest(
    folder: DataFolder, stamp: Mapping[str, Any], units: Path
) -> list[tuple[str, int, int]]:
    """(name, sequences, documents) of the shards of a pair that is as it was when dataset.json
    was written; else nothing."""
    identities = [
        file_identity(path)
        for path in (bin_path(folder.prefix), idx_path(folder.prefix), folder.manifest)
    ]
    # killed between the last unit and the stage's stamp
    merged = read_stamp(units / "merge.json") or {}
    known = (stamp.get("outputs", stamp.get("made_before", [])), merged.get("outputs", []))
    if None in identities or not any(all(i in recorded for i in identities) for recorded in known):
        return []
    manifest = read_manifest(folder.manifest)
    counts = [
        (str(shard["name"]), int(shard.get("sequences", 0)), int(shard.get("documents", 0)))
        for shard in manifest["shards"]
    ]
    whole = sum(count[1] for count in counts), sum(count[2] for count in counts)
    if manifest.get("shuffled") or whole != (manifest["sequences"], manifest["documents"]):
        return []
    return counts


def _of_unfinished(prefix: Path) -> list[tuple[str, int, int]]:
    """The same of a pair whose merge was killed before it wrote dataset.json."""
    identities = [file_identity(path) for path in (bin_path(prefix), idx_path(prefix))]
    try:
        value = read_json(ranges_path(prefix))
        same = [identity[1:] for identity in identities if identity] == value["pair"]
        if same:
            return [
                (str(name), int(sequences), int(documents))
                for name, sequences, documents in value["shards"]
            ]
        return []
    except (OSError, ValueError, KeyError, TypeError):
        return []  # there is none, or none that can be read
