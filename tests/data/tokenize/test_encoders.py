"""Encoders: two that give the same ids, the check of one by the other, and the end-of-document
id."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from tests.shared import golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.tokenize import encoders as encode
from trainkit.data.tokenize.encoders import (
    CheckedEncoder,
    Encoder,
    EncoderCache,
    EncoderMismatch,
    GigatokenEncoder,
    HuggingFaceEncoder,
    Ids,
    Lengths,
    with_eod,
)
from trainkit.data.tokenizer import gpt2_bpe, load_tokenizer, train_bpe
from trainkit.data.unit_specs import SpecialTokens

EOD = "<|endoftext|>"
HARD = [
    "",
    " ",
    "hello world's 'S it's",
    f"a{EOD}b {EOD}",
    EOD,
    "<|endoftext",
    "\x00\x1c\u00a0\u3000\ufeff x\r\n\r\ny  \t z   ",
    "e\u0301 \u00e9 \u212b \ufb01",
    "\U0001f600\u200d" * 20,
    "x" * 20_000,
    "        if a:\n\n\n            b = 1",
    "中文字 עברית ١٢٣",
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers by name: one trained here; GPT-2's and GPT-NeoX-20B's where they are on this
    machine."""
    folder = tmp_path_factory.mktemp("tokenizers")
    trained = folder / "trained.json"
    train_bpe(
        iter([*HARD, "the quick brown fox " * 50, Path(__file__).read_text()]), 600, EOD
    ).save(str(trained))
    found = {"trained": trained}
    if (vectors := golden()) is not None:
        gpt2 = folder / "gpt2.json"
        gpt2_bpe(vectors.parent / "gpt2-vocab.json", vectors.parent / "gpt2-merges.txt", EOD).save(
            str(gpt2)
        )
        found |= {"gpt2": gpt2, "neox": vectors.parent / "20B_tokenizer.json"}
    return found


def both(path: Path, special: SpecialTokens) -> tuple[Encoder, Encoder]:
    pytest.importorskip("gigatoken")
    return HuggingFaceEncoder(load_tokenizer(path), special), GigatokenEncoder(path, special)


def ids_of(encoder: Encoder, texts: Sequence[str]) -> list[list[int]]:
    ids, lengths = encoder.encode([text.encode() for text in texts])
    assert lengths.dtype == np.int64 and len(lengths) == len(texts) and lengths.sum() == len(ids)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []


@pytest.mark.parametrize("special", ["text", "parse"])
@pytest.mark.parametrize("name", ["trained", "gpt2", "neox"])
def test_both_give_the_same_ids(name: str, special: SpecialTokens, paths: dict[str, Path]) -> None:
    if name not in paths:
        pytest.skip("the tokenizer is not on this machine (TRAINKIT_TEST_DATA)")
    slow, fast = both(paths[name], special)
    assert ids_of(fast, HARD) == ids_of(slow, HARD)
    assert ids_of(fast, []) == [] == ids_of(slow, [])
    tokenizer = load_tokenizer(paths[name])
    eod = tokenizer.token_to_id(EOD)
    assert (
        ids_of(fast, [EOD]) == [[eod]] if special == "parse" else eod not in ids_of(fast, [EOD])[0]
    )
    assert all(eod not in ids for ids in ids_of(slow, HARD)) == (special == "text")
    assert fast.highest <= slow.highest


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=5))
@settings(deadline=None)
def test_any_text(paths: dict[str, Path], texts: list[str]) -> None:
    slow, fast = both(paths["trained"], "text")
    assert ids_of(fast, texts) == ids_of(slow, texts)


def test_gpt2_from_its_two_files_gives_the_published_ids(paths: dict[str, Path]) -> None:
    vectors = golden()
    if vectors is None:
        pytest.skip("the golden files are not on this machine (TRAINKIT_TEST_DATA)")
    cases = json.loads((vectors / "gpt2_ids.json").read_text())
    cases = cases["cases"] if isinstance(cases, dict) else cases
    assert len(cases) > 20
    for special in ("text", "parse"):
        for encoder in both(paths["gpt2"], special):
            for case in cases:
                expected = case["ids"] if special == "text" else case.get("hf_ids", case["ids"])
                assert ids_of(encoder, [case["text"]]) == [expected], (special, case["text"])


@pytest.mark.parametrize(
    ("vocabulary", "merges", "words"),
    [
        ("[", "a b", "cannot be read as GPT-2's files"),
        ("[]", "a b", "is not an object"),
        (
            '{"a": 0, "b": 1, "ab": 2, "E": 3}',
            "#version: 0.2\na b\na b c\n",
            "merge 2 is 'a b c', which is not two tokens",
        ),
        ('{"a": 0, "b": 1, "E": 3}', "a b", "merge 1 is 'a b', which is not two tokens"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b", "has no token 'E'"),
    ],
)
def test_wrong_gpt2_files_are_named(
    vocabulary: str, merges: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ConfigError, match=words) as caught:
        gpt2_bpe(tmp_path / "vocab.json", tmp_path / "merges.txt", "E")
    assert caught.value.exit == Exit.STAGE_FAILED


def test_a_tokenizer_that_cuts_texts_does_not_cut_them_here(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(paths["trained"]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "cutting.json"))
    whole = HuggingFaceEncoder(load_tokenizer(paths["trained"]), "text")
    for encoder in both(tmp_path / "cutting.json", "text"):
        assert ids_of(encoder, ["a", "hello world " * 9]) == ids_of(
            whole, ["a", "hello world " * 9]
        )


class Plain:
    """An encoder whose ids are the bytes; text number `wrong`, counted from the start, gets
    another last id."""

    def __init__(self, wrong: int = -1) -> None:
        self.highest, self.wrong, self.seen = 255, wrong, 0
        self.calls: list[bytes] = []

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        ids = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint32)
        lengths = np.array([len(text) for text in texts], np.int64)
        if self.seen <= self.wrong < self.seen + len(texts):
            ids[int(lengths[: self.wrong - self.seen + 1].sum()) - 1] += 1
        self.seen += len(texts)
        self.calls += texts
        return ids, lengths


@pytest.mark.parametrize(
    ("wrong", "caught"),
    [(0, True), (4, True), (5, False), (11, False), (12, True), (13, False), (22, True)],
)
def test_the_first_and_one_in_many_are_compared(
    wrong: int, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHECKED_EVERY", 10)
    texts = [b"text %03d" % number for number in range(30)]
    checked = CheckedEncoder(Plain(wrong), Plain(), first=5, offset=2)
    difference: EncoderMismatch | None = None
    try:
        for start in range(0, 30, 7):
            checked.encode(texts[start : start + 7])
    except EncoderMismatch as error:
        difference = error
    assert (difference is not None) == caught
    if difference is not None:
        assert difference.index == wrong % 7 and "id 7 is" in difference.words
    else:
        assert checked.compared == 5 + 2


def test_of_long_first_documents_the_start_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHECKED_BYTES", 100)
    monkeypatch.setattr(encode, "CHECKED_START", 9)
    exact = Plain()
    CheckedEncoder(Plain(), exact, first=4, offset=9000).encode(
        [b"a" * 60, b"b" * 60, ("ä" * 50).encode(), b"c" * 40, b"d" * 60]
    )
    assert exact.calls == [b"a" * 60, b"b" * 9, ("ä" * 4).encode(), b"c" * 40]


def test_a_longer_or_shorter_answer_differs() -> None:
    class Short(Plain):
        def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
            return super().encode([text[:-1] for text in texts])

    for fast, exact in ((Short(), Plain()), (Plain(), Short())):
        with pytest.raises(EncoderMismatch, match=r"id 2 is .* ids and "):
            CheckedEncoder(fast, exact, first=1, offset=0).encode([b"abc"])


def test_without_gigatoken_it_is_said(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(
        encode, "unproved_reason", lambda value, special: "gigatoken is not installed"
    )
    for key in ("tokenizers", "auto"):
        _, encoder, choice = EncoderCache().get(paths["trained"], key, "text", first=0, offset=0)
        assert isinstance(encoder, HuggingFaceEncoder) and choice.name == "tokenizers"
    assert choice.because == "gigatoken is not installed"
    with pytest.raises(ConfigError, match="gigatoken, which is not installed") as caught:
        EncoderCache().get(paths["trained"], "gigatoken", "text", first=0, offset=0)
    assert caught.value.exit == Exit.STAGE_FAILED


def test_a_model_that_gigatoken_has_not_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, EOD: 1}, unk_token=EOD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match="gigatoken cannot use"):
        GigatokenEncoder(tmp_path / "words.json", "text")


def reference(documents: list[list[list[int]]], eod: int | None) -> tuple[list[int], list[int]]:
    """Megatron's preprocess_data.py, one document after another."""
    tokens, lengths = [], []
    for document in documents:
        kept = [sequence for sequence in document if sequence]
        if kept and eod is not None:
            kept[-1] = [*kept[-1], eod]
        tokens += [token for sequence in kept for token in sequence]
        lengths += [len(sequence) for sequence in kept]
    return tokens, lengths


sequences = st.lists(st.integers(0, 60000), max_size=4)


@given(
    st.lists(st.lists(sequences, max_size=4), max_size=8),
    st.sampled_from([None, 50256]),
    st.sampled_from(["<u2", "<i4"]),
)
@settings(deadline=None)
def test_end_of_document_as_megatron(
    documents: list[list[list[int]]], eod: int | None, dtype: str
) -> None:
    flat = [sequence for document in documents for sequence in document]
    ids = np.array([token for sequence in flat for token in sequence], np.uint32)
    lengths = np.array([len(sequence) for sequence in flat], np.int64)
    counts = np.array([len(document) for document in documents], np.int64)
    tokens, longer = with_eod(ids, lengths, counts, eod, dtype)
    expected: Any = reference(documents, eod)
    assert (tokens.tolist(), longer[longer > 0].tolist()) == expected and tokens.dtype == np.dtype(
        dtype
    )


@given(st.lists(sequences, max_size=8))
@settings(deadline=None)
def test_end_of_document_of_single_sequences(documents: list[list[int]]) -> None:
    ids = np.array([token for document in documents for token in document], np.uint32)
    tokens, longer = with_eod(ids, np.array([len(d) for d in documents], np.int64), None, 7, "<i4")
    assert (tokens.tolist(), longer[longer > 0].tolist()) == reference([[d] for d in documents], 7)


@pytest.mark.parametrize(
    ("stops", "out", "words"),
    [
        ([2, 1], np.empty(5, np.uint16), "do not rise"),
        ([4, 4], np.empty(5, np.int32), "do not rise"),
        ([1], np.empty(5, np.uint16), "out has 5 elements, not 4"),
    ],
)
def test_interleave_refuses_what_does_not_fit(stops: list[int], out: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _index.interleave(np.arange(3, dtype=np.uint32), np.array(stops, np.int64), 7, out)
    with pytest.raises(ValueError, match="uint16 or int32"):
        _index.interleave(
            np.arange(3, dtype=np.uint32),
            np.array([1], np.int64),
            7,
            np.empty(4, np.int64),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("letters", ["x", "acgt", "\n", "#="])
def test_a_bpe_is_trained_on_a_very_long_word(letters: str) -> None:
    """The library takes the square of its length: minutes for each of these."""
    word = "".join(random.Random(1).choices(letters, k=300_000))
    began = time.process_time()
    trained = train_bpe(iter(["plain text " * 9, word]), 400, EOD)
    assert time.process_time() - began < 20
    assert trained.decode(trained.encode(word).ids) == word
    kind = json.loads(trained.to_str())["pre_tokenizer"]["type"]
    assert kind == "ByteLevel"  # as the encoders know it
