"""What data-stats counts, beside the same counted one document at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from tests.data.pairs import write_sequences
from trainkit.base.errors import ConfigError
from trainkit.data.indexed import statistics as module
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.statistics import count, document_lengths, draw_statistics, statistics
from trainkit.data.tokenizer import train_bpe

WORDS = ["alpha beta gamma", "delta", "epsilon zeta eta theta iota", "kappa lambda"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(iter(WORDS * 20), 300, "<|endoftext|>")


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), max_size=3), max_size=9
)


@settings(max_examples=60, deadline=None)
@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.integers(1, 4))
def test_against_plain_counting(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    pairs: list[list[list[list[int]]]],
    block: int,
) -> None:
    """Several pairs, several sequences a document, empty documents; in blocks of a few, so that
    every border is crossed."""
    folder = tmp_path_factory.mktemp("stats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        prefixes = [write_sequences(folder / str(i), pair) for i, pair in enumerate(pairs)]
        patch.setattr(module, "BLOCK", block)
        patch.setattr(module, "DOCUMENTS", block)
        found = statistics(prefixes, tokenizer, samples=100, sample_tokens=5, frequent=1000)
    documents = [
        (i, number, [t for s in sequences for t in s])
        for i, pair in enumerate(pairs)
        for number, sequences in enumerate(pair)
    ]
    lengths = sorted(len(tokens) for _, _, tokens in documents)
    ids = Counter(t for _, _, tokens in documents for t in tokens)
    assert (found.counts.documents, found.counts.tokens) == (
        len(documents),
        sum(lengths),
    ) and found.counts == count(prefixes)
    assert found.counts.sequences == sum(len(sequences) for pair in pairs for sequences in pair)
    assert (found.longest, found.empty_documents, found.ids_used) == (
        max(lengths, default=0),
        lengths.count(0),
        len(ids),
    )
    for b in found.lengths:
        inside = [n for n in lengths if b.low <= n <= b.high]
        assert (b.documents, b.tokens) == (len(inside), sum(inside))
    assert sum(b.documents for b in found.lengths) == len(documents)
    assert {entry.id: entry.count for entry in found.frequent} == ids
    assert [entry.count for entry in found.frequent] == sorted(ids.values(), reverse=True)
    if lengths:
        assert found.percentiles == {
            p: lengths[max(0, -(-len(lengths) * p // 100) - 1)] for p in (1, 10, 50, 90, 99)
        }
    # as many samples as there are documents with a token: all of them, with their own words
    shown = [
        (int(sample.pair), sample.document, sample.tokens, sample.text) for sample in found.samples
    ]
    assert shown == [
        (i, n, len(t), tokenizer.decode(t[:5], skip_special_tokens=False))
        for i, n, t in documents
        if t
    ]


def test_samples_depend_on_the_seed_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prefix = write_sequences(tmp_path / "p", [[[number]] for number in range(200)])
    one, again, other = (
        [s.document for s in statistics([prefix], tokenizer, samples=8, seed=seed).samples]
        for seed in (1, 1, 2)
    )
    assert one == again != other and len(set(one)) == 8 and one == sorted(one)


def test_lengths_of_long_documents(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST", 8)
    found = statistics(
        [write_sequences(tmp_path / "p", [[[1] * n] for n in (1, 2, 4, 30, 40)])], tokenizer
    )
    assert found.percentiles[50] == 4 and found.percentiles[99] == 8  # 8 stands for all above
    assert found.longest == 40 and [
        (b.low, b.high, b.documents) for b in found.lengths if b.documents
    ] == [
        (1, 1, 1),
        (2, 3, 1),
        (4, 7, 1),
        (16, 31, 1),
        (32, 63, 1),
    ]


def test_an_id_above_the_vocabulary_is_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = statistics([write_sequences(tmp_path / "p", [[[65000, 65000]]])], tokenizer)
    assert (found.frequent[0].id, found.frequent[0].count) == (65000, 2)


def test_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = statistics([write_sequences(tmp_path / "p", [])], tokenizer)
    assert found.counts.tokens == 0 and not any(
        (found.lengths, found.frequent, found.samples, found.percentiles)
    )
    assert list(document_lengths(IndexedDataset(tmp_path / "p"))) == []


def test_pictures(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("matplotlib")
    found = statistics([write_sequences(tmp_path / "p", [[[1, 2, 3]], [[1]]])], tokenizer)
    draw_statistics("words", found, tmp_path / "p.svg")
    svg = (tmp_path / "p.svg").read_text()
    assert "words: 2 documents" in svg and "4 tokens, 3 of" in svg
    draw_statistics("words", found, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    draw_statistics(
        "none", statistics([write_sequences(tmp_path / "e", [])], tokenizer), tmp_path / "e.svg"
    )
    with pytest.raises(ConfigError, match=r"p\.jpg does not end in"):
        draw_statistics("words", found, tmp_path / "p.jpg")
