"""Duplicates: the groups are datatrove's, the chance to find one is the formula's, and what is kept
depends on the documents alone."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.data.curate import datatrove_verdicts
from tests.data.curate.curation_cases import near_duplicates
from tests.data.curate.test_rules import golden
from trainkit import _index
from trainkit.base.errors import ConfigError
from trainkit.data.curate import duplicates_worker
from trainkit.data.curate.duplicates_worker import work
from trainkit.data.curate.filter_worker import FilterWorker
from trainkit.data.curate.key_files import DUPLICATES, KeyNumbers, open_keys, read_words
from trainkit.data.curate.read_back import ID, ORIGIN, document_key, read_shard
from trainkit.data.curate.signatures import MinHashKeys
from trainkit.data.curate.specs import (
    ClusterSpec,
    FilterResult,
    FilterSpec,
    JoinSpec,
    KeysSpec,
    NumberSpec,
)
from trainkit.data.text.write_shards import DocumentWriter
from trainkit.data.unit_specs import ReadingSettings
from trainkit.jobs.curation import ExactStep, MinHashStep

PEER = os.environ.get("TRAINKIT_DATATROVE_PYTHON", "")
MINHASH = MinHashStep(step="minhash").model_dump(mode="json")
EXACT = ExactStep(step="exact").model_dump(mode="json")


def run(spec: Any) -> None:
    """One unit, from its JSON as a worker gets it."""
    work(json.loads(json.dumps(spec.to_json())), lambda *at, **counts: None)


def write_keys(folder: Path, name: str, texts: list[str], step: dict[str, Any]) -> Path:
    """A shard of texts, and its key file."""
    shard = folder / f"{name}.jsonl.zst"
    with DocumentWriter(shard) as writer:
        for number, text in enumerate(texts):
            key = document_key(text, {})
            writer.add(text, {ID: f"{key:016x}", ORIGIN: f"{name}:{number}"})
    keys = folder / f"{name}.keys"
    run(KeysSpec(shard, "text", step, "en", keys))
    return keys


def compare(
    folder: Path, shards: list[list[str]], step: dict[str, Any], against: Sequence[list[str]] = ()
) -> list[tuple[int, int, int, int]]:
    """The rows of duplicates of texts in shards."""
    folder.mkdir()
    other, keys = (
        tuple(write_keys(folder, f"{kind}{i}", texts, step) for i, texts in enumerate(given))
        for kind, given in (("other", against), ("own", shards))
    )
    numbers, out = folder / "numbers.json", folder / "duplicates"
    run(NumberSpec(other, keys, numbers))
    if step["step"] == "minhash":
        edges = tuple(folder / f"{band}.pairs" for band in range(step["bands"]))
        for band, path in enumerate(edges):
            run(JoinSpec(numbers, band, 0, 1, True, path))
        run(ClusterSpec(numbers, edges, out))
        rows = read_words(out, DUPLICATES).tolist()
    else:
        parts = [folder / f"{part}.duplicates" for part in range(3)]
        for part, path in enumerate(parts):
            run(JoinSpec(numbers, 0, part, 3, False, path))
        rows = sorted(row for path in parts for row in read_words(path, DUPLICATES).tolist())
    return [tuple(row) for row in rows]


def groups(rows: list[tuple[int, int, int, int]], place: list[int]) -> list[list[int]]:
    """The groups that rows name, documents by `place`."""
    found: dict[int, set[int]] = {}
    for number, _, kept, size in rows:
        found.setdefault(kept, {place[kept]}).add(place[number])
        assert size >= 2
    return sorted(sorted(group) for group in found.values())


def split(texts: list[str], shards: int, seed: int) -> tuple[list[list[str]], list[int]]:
    """Texts in a random order over shards; which text each document is."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    parts = [order[first::shards] for first in range(shards)]
    return [[texts[i] for i in part] for part in parts], [i for part in parts for i in part]


def test_groups_are_those_of_datatrove(tmp_path: Path) -> None:
    texts = near_duplicates(1500)
    shards, place = split(texts, 3, seed=0)
    found = groups(compare(tmp_path / "mine", shards, MINHASH), place)
    assert found == golden("clusters")["clusters"] and len(found) > 500


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="TRAINKIT_DATATROVE_PYTHON names no interpreter")
def test_the_package_itself_finds_these_groups(tmp_path: Path) -> None:
    script = datatrove_verdicts.__file__
    out = subprocess.run([PEER, script, "clusters", "5000"], capture_output=True, check=True)
    texts = near_duplicates(5000)
    shards, place = split(texts, 7, seed=1)
    found = groups(compare(tmp_path / "mine", shards, MINHASH), place)
    assert found == json.loads(out.stdout)["clusters"]


@pytest.mark.parametrize("step", [MINHASH, EXACT], ids=["minhash", "exact"])
def test_what_is_kept_depends_on_the_documents_alone(tmp_path: Path, step: dict[str, Any]) -> None:
    texts = near_duplicates(150)
    kept = set()
    for run_number, shards in enumerate((1, 3, 17)):
        parts, place = split(texts, shards, seed=run_number)
        rows = compare(tmp_path / str(run_number), parts, step)
        gone = {number for number, *_ in rows}
        left = sorted(texts[place[n]] for n in range(len(texts)) if n not in gone)
        kept.add(tuple(left))
    assert len(kept) == 1 and 100 < len(left) < len(texts)


def test_the_longest_of_a_group_is_kept(tmp_path: Path) -> None:
    base = near_duplicates(1, seed=9)[0].split()
    texts = [" ".join(base), " ".join([*base, "tail"]), " ".join(base[1:])]
    assert [row[:3] for row in compare(tmp_path / "x", [texts], MINHASH)] == [(0, 0, 1), (2, 0, 1)]


def test_documents_of_another_dataset_are_kept(tmp_path: Path) -> None:
    texts = near_duplicates(20)
    longer = [f"{text} and a little more than that" for text in texts]
    for step, own in ((MINHASH, longer), (EXACT, texts)):
        rows = compare(tmp_path / str(step["step"]), [own], step, against=[texts[:5], texts[5:]])
        assert {row[0] for row in rows} == set(range(len(texts), 2 * len(texts)))
        assert all(row[2] < len(texts) for row in rows)


def test_the_chance_to_be_found_is_the_formulas() -> None:
    """1 - (1 - s^rows)^bands for pairs of known Jaccard index s of their shingles, within four
    standard errors."""
    table = MinHashStep(step="minhash")
    maker = MinHashKeys(table, "en")
    dice = random.Random(5)
    letters = "bcdfghjklmnpqrstvwz"
    pairs = 300
    for changed in (8, 14, 22, 34):
        hits, expected, spread = 0, 0.0, 0.0
        for _ in range(pairs):
            words = ["".join(dice.choice(letters) for _ in range(7)) for _ in range(150)]
            other = [
                *words[:-changed],
                *("".join(dice.choice(letters) for _ in range(7)) for _ in range(changed)),
            ]
            sets = [
                {tuple(each[i : i + 5]) for i in range(len(each) - 4)} for each in (words, other)
            ]
            s = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
            chance = 1 - (1 - s**table.rows) ** table.bands
            expected += chance
            spread += chance * (1 - chance)
            a, b = (maker.values(" ".join(each)).reshape(-1, table.rows) for each in (words, other))
            hits += bool((a == b).all(axis=1).any())
        assert abs(hits - expected) <= 4 * math.sqrt(spread) + 1, (changed, hits, expected)


def test_one_text_a_hundred_thousand_times(tmp_path: Path) -> None:
    """Pairs grow with the documents, not with their square."""
    text = " ".join(near_duplicates(1, seed=4)[0].split()[:12])
    rows = compare(tmp_path / "x", [[text] * 60_000, [text] * 40_000], EXACT)
    assert len(rows) == 99_999 and {row[2:] for row in rows} == {(rows[0][2], 100_000)}


@pytest.mark.parametrize("step", [MINHASH, EXACT], ids=["minhash", "exact"])
def test_ranges_of_keys_find_what_all_at_once_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: dict[str, Any]
) -> None:
    """One text is in a fifth of the documents: its range is larger than the others."""
    texts = near_duplicates(40)
    shards, _ = split([*texts, *texts[:9], *12 * texts[:1]], 9, seed=2)
    whole = compare(tmp_path / "whole", shards, step)
    monkeypatch.setattr(duplicates_worker, "MEMORY", 64)
    monkeypatch.setattr(duplicates_worker, "RECORDS", 3)
    assert compare(tmp_path / "ranges", shards, step) == whole and len(whole) > 20


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60), st.randoms())
@settings(max_examples=200)
def test_components_do_not_depend_on_the_order_of_edges(
    edges: list[tuple[int, int]], dice: random.Random
) -> None:
    found = []
    for _ in range(2):
        dice.shuffle(edges)
        parents = np.arange(41, dtype=np.uint32)
        _index.unite(parents, np.array(edges, np.uint64).reshape(-1, 2))
        _index.find_roots(parents)
        found.append(parents.tolist())
    least = list(range(41))
    for _ in range(41):
        for a, b in edges:
            least[a] = least[b] = min(least[a], least[b])
    assert found == [least, least]


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_key_file_is_named(tmp_path: Path, damage: str) -> None:
    path = write_keys(tmp_path, "one", near_duplicates(5), MINHASH)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-8], "empty": b"", "other": b"x" * len(data)}[damage])
    with pytest.raises(ConfigError, match="is not a key file"):
        open_keys(path)
    with pytest.raises(ConfigError, match=r"one\.keys"):
        KeyNumbers.count([], [path])


def test_empty_shards_are_shards(tmp_path: Path) -> None:
    texts = near_duplicates(10)
    for number, step in enumerate((MINHASH, EXACT)):
        rows = compare(tmp_path / str(number), [[], texts, [], texts[:1], []], step)
        assert any(row[0] == len(texts) or row[2] == len(texts) for row in rows)
    assert list(itertools.chain(compare(tmp_path / "none", [[], []], MINHASH))) == []


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_a_blank_document_is_no_duplicate(
    tmp_path: Path, unit: Literal["line", "paragraph"]
) -> None:
    step = ExactStep(step="exact", unit=unit).model_dump(mode="json")
    folder = tmp_path / "blank"
    compare(folder, [["\n\n", "", "some words", "some words"]], step)
    spec = FilterSpec(
        name="own0",
        shard=folder / "own0.jsonl.zst",
        recipe=None,
        size=1,
        reading=ReadingSettings("text"),
        steps=(),
        numbers=(),
        language="en",
        output=folder / "out.jsonl.zst",
        dropped=folder / "dropped.jsonl.zst",
        rejects=folder / "rejects.jsonl",
        keys=folder / "own0.keys",
        numbers_file=folder / "numbers.json",
        duplicates=tuple(folder / f"{part}.duplicates" for part in range(3)),
        duplicates_step=step,
    )
    value = json.loads(json.dumps(spec.to_json()))
    result = FilterResult.from_json(FilterWorker()(value, lambda *at, **counts: None))
    assert result.steps[0].reasons == {"duplicate": 1}
    assert [each.text for each in read_shard(spec.output, "text")] == ["\n\n", "", "some words"]
