"""That gigatoken gives the ids of tokenizers: the table of code points is that of the installed
versions, and what is not compared is not believed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.data import encoder_proof
from tests.data.encoder_proof import KINDS, NormalForms, tokenizer_json
from tests.shared import golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.tokenize import proved, proved_table
from trainkit.data.tokenize.encoders import (
    CheckedEncoder,
    EncoderCache,
    EncoderMismatch,
    GigatokenEncoder,
    HuggingFaceEncoder,
    HybridEncoder,
    choose_encoder,
)
from trainkit.data.tokenizer import gpt2_bpe, load_tokenizer, train_bpe
from trainkit.data.unit_specs import SpecialTokens

EOD = "<|endoftext|>"
CLASS = [point for low, high in proved_table.CLASSES for point in (low, high)]
MARKS = [point for low, high in proved_table.NFC for point in (low, high)]
VERSIONS: dict[str, str | None] = {name: found[0] for name, found in proved_table.VERSIONS.items()}


@pytest.fixture(autouse=True)
def _both_are_here() -> None:
    pytest.importorskip("gigatoken")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer.json of each kind, all with a normalizer too, and the published ones where
    they are on this machine."""
    folder = tmp_path_factory.mktemp("tokenizers")
    trained = json.loads(
        train_bpe(
            iter(["the quick brown fox's 12 345\n\n  x", "für die Straße, 中文字"] * 30), 400, EOD
        ).to_str()
    )
    found = {}
    for kind, steps in KINDS.items():
        for normalizer in (None, {"type": "NFC"}):
            name = f"{kind}{'-nfc' if normalizer else ''}"
            found[name] = folder / f"{name}.json"
            found[name].write_text(
                json.dumps({**trained, "pre_tokenizer": steps, "normalizer": normalizer})
            )
    if (vectors := golden()) is not None:
        found |= {
            "gpt2-published": folder / "published.json",
            "neox-published": vectors.parent / "20B_tokenizer.json",
        }
        gpt2_bpe(vectors.parent / "gpt2-vocab.json", vectors.parent / "gpt2-merges.txt", EOD).save(
            str(found["gpt2-published"])
        )
    return found


def test_the_table_is_of_the_installed_versions() -> None:
    """Another version may have other tables: run `python -m tests.data.encoder_proof` and look
    at what it writes."""
    for name, version in proved.installed().items():
        assert version in proved_table.VERSIONS[name]


def test_the_table_is_written_as_the_script_writes_it() -> None:
    """So that a run of it whose result is the same leaves the file as it was."""
    assert Path(proved_table.__file__).read_text() == encoder_proof.table(
        proved_table.VERSIONS, proved_table.CLASSES, proved_table.NFC
    )


def test_the_table_says_what_the_two_do_today() -> None:
    """Of each listed code point, its neighbours, and some thousand others: exactly the listed
    ones are seen differently."""
    dice = random.Random(5)
    near = {
        point + step
        for low, high in (*proved_table.CLASSES, *proved_table.NFC)
        for point in (low, high)
        for step in (-1, 0, 1)
    }
    points = sorted(
        {
            p
            for p in near | {dice.choice(encoder_proof.EVERY) for _ in range(5000)}
            if not 0xD800 <= p < 0xE000
        }
    )
    listed = {point for low, high in proved_table.CLASSES for point in range(low, high + 1)}
    for kind in KINDS:
        assert encoder_proof.classes(kind, points) == listed & {*points}, kind
    marks = {point for low, high in proved_table.NFC for point in range(low, high + 1)}
    differing = encoder_proof.order_differs(NormalForms(), points)
    assert differing <= marks
    found = NormalForms().differ(["\u059f\u08cf", "\u0344a", "\U00011935\U00011930"])
    assert found == [0, 2], "the order of a mark of Unicode 14, and what Unicode 13 composes"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_table_is_what_the_script_makes() -> None:
    assert encoder_proof.compare() == (proved_table.CLASSES, proved_table.NFC)


def of_unlike_characters(dice: random.Random, size: int) -> str:
    """Words, signs, digits, spaces, and every other character one that the two see differently."""
    plain = [
        "a",
        "Word",
        "'s",
        "12",
        " ",
        "  ",
        "\n",
        "!",
        "é",
        "e\u0301",
        "中",
        "\U0001f600",
        "\u0300",
        "\u059f",
        "\u0c95",
    ]
    return "".join(
        dice.choice(plain) + (chr(dice.choice(CLASS + MARKS)) if dice.random() < 0.5 else "")
        for _ in range(size)
    )


@pytest.mark.parametrize("special", ["text", "parse"])
def test_documents_with_listed_code_points_have_the_ids_of_tokenizers(
    special: SpecialTokens, paths: dict[str, Path]
) -> None:
    dice = random.Random(7)
    texts = [of_unlike_characters(dice, dice.randrange(12)).encode() for _ in range(600)] + [
        b"",
        b"plain",
        "\u059f\u08cf".encode(),
    ]
    alone = 0
    for name, path in paths.items():
        exact = HuggingFaceEncoder(load_tokenizer(path), special)
        value = json.loads(path.read_text())
        assert proved.unproved_reason(value, special, VERSIONS) is None, name
        together = HybridEncoder(
            GigatokenEncoder(path, special), exact, proved.differing_code_points(value)
        )
        ids, lengths = together.encode(texts)
        expected, sizes = exact.encode(texts)
        assert np.array_equal(ids, expected) and np.array_equal(lengths, sizes), name
        assert 100 < together.passed_on < len(texts)
        alone += not np.array_equal(GigatokenEncoder(path, special).encode(texts)[0], expected)
    assert alone == len(paths), "without tokenizers they would have been others"


@settings(max_examples=40)
@given(st.data(), st.integers(0, 2**32))
def test_the_merges_are_alike_whatever_the_model(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int
) -> None:
    """Any merges, also two with one result; tokens that no merge makes; added tokens that begin
    alike."""
    dice, characters = random.Random(seed), proved.byte_characters()
    known = [characters[ord(c)] for c in "abch 1!\n"] + [characters[0xC3], characters[0xA9]]
    merges: dict[tuple[str, str], None] = {}
    for _ in range(dice.randrange(200)):
        pair = dice.choice(known), dice.choice(known)
        merges[pair] = None
        known.append("".join(pair))
    kind = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    contents = data.draw(
        st.lists(
            st.sampled_from(["XY", "XYZ", "YZ", "X Z", "<X>", "   ", "YXY"]),
            max_size=4,
            unique=True,
        )
    )
    size = 257 + len(set(map("".join, merges)))
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {
            **plain,
            "id": size + i,
            "content": c,
            "special": dice.random() < 0.5,
            "normalized": dice.random() < 0.5,
        }
        for i, c in enumerate(contents)
    ]
    content = tokenizer_json(kind, merges, added=added, ignore_merges=data.draw(st.booleans()))
    value = json.loads(content)
    if any(token["content"] in value["model"]["vocab"] for token in added):
        return
    if reason := proved.unproved_reason(value, "parse", VERSIONS):
        assert "overlap and differ" in reason
        return
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    path.write_bytes(content)
    texts = [
        "".join(
            dice.choice(["a", "b", "c", "h", " ", "1", "!", "\n", "é", "X", "Y", "Z", "<X>"])
            for _ in range(dice.randrange(50))
        )
        for _ in range(20)
    ]
    for special in ("text", "parse"):
        slow, fast = (
            HuggingFaceEncoder(load_tokenizer(path), special),
            GigatokenEncoder(path, special),
        )
        a, b = (
            [array.tolist() for array in encoder.encode([text.encode() for text in texts])]
            for encoder in (slow, fast)
        )
        assert a == b


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tokenizer_json(KINDS["gpt2"]))
    change(value)
    return value


DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {**encoder_proof.BYTE_LEVEL, "use_regex": True},
    ],
}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            changed(lambda v: v.update(pre_tokenizer=DIGITS)),
            "a sequence (Digits, ByteLevel) that was not compared",
        ),
        (
            changed(
                lambda v: v.update(
                    pre_tokenizer={
                        "type": "Sequence",
                        "pretokenizers": [*KINDS["llama3"]["pretokenizers"], DIGITS],
                    }
                )
            ),
            "was not compared",
        ),
        (
            changed(lambda v: v.update(pre_tokenizer={**KINDS["gpt2"], "add_prefix_space": True})),
            "its pre_tokenizer (ByteLevel) was not compared",
        ),
        (changed(lambda v: v.update(pre_tokenizer=None)), "it has no pre_tokenizer"),
        (
            changed(lambda v: v.update(normalizer={"type": "Lowercase"})),
            "its normalizer is Lowercase",
        ),
        (changed(lambda v: v["model"].update(type="Unigram")), "its model is Unigram"),
        (
            changed(lambda v: v["model"].update(byte_fallback=True)),
            "its model has byte_fallback = True",
        ),
        (changed(lambda v: v["model"].update(dropout=0.1)), "its model has dropout = 0.1"),
        (changed(lambda v: v["model"]["vocab"].pop("a")), "its vocabulary lacks the byte 0x61"),
        (
            changed(lambda v: v["added_tokens"][0].update(lstrip=True)),
            f"its added token {encoder_proof.SEPARATOR!r} has lstrip = true",
        ),
        (
            changed(lambda v: v["added_tokens"][0].update(content="a")),
            "its added token 'a' has another id in the vocabulary",
        ),
        (
            changed(
                lambda v: (
                    v.update(normalizer={"type": "NFC"}),
                    v["added_tokens"][0].update(content="éé"),
                )
            ),
            "is not ASCII, and it has a normalizer",
        ),
    ],
)
def test_what_was_not_compared_is_not_believed(
    value: dict[str, Any], words: str, tmp_path: Path
) -> None:
    reason = proved.unproved_reason(value, "parse", VERSIONS)
    assert reason is not None and words in reason
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(value))
    assert (
        choose_encoder(path, "auto", "parse").name == "tokenizers"
        and words in choose_encoder(path, "auto", "parse").because
    )
    with pytest.raises(ConfigError, match="gigatoken is not proved to give the ids") as refused:
        choose_encoder(path, "gigatoken", "parse")
    assert refused.value.exit == Exit.STAGE_FAILED


def test_special_tokens_that_are_text_need_no_proof() -> None:
    assert (
        proved.unproved_reason(
            changed(lambda v: v["added_tokens"][0].update(lstrip=True)), "text", VERSIONS
        )
        is None
    )


def test_a_version_that_was_not_compared_is_not_believed() -> None:
    value = changed(lambda v: None)
    assert (
        proved.unproved_reason(value, "text", {**VERSIONS, "gigatoken": "99.1"})
        == "gigatoken 99.1 was not compared, only 0.10.0"
    )
    assert (
        proved.unproved_reason(value, "text", {**VERSIONS, "gigatoken": None})
        == "gigatoken is not installed"
    )
    assert proved.unproved_reason(value, "text", VERSIONS) is None


def test_the_first_documents_are_compared_all_the_same(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, encoder, choice = EncoderCache().get(paths["gpt2"], "auto", "text", first=3, offset=5000)
    assert (
        choice.name == "gigatoken"
        and "gigatoken" in choice.because
        and isinstance(encoder, CheckedEncoder)
    )
    encoder.encode([b"one", "\u088f".encode(), b"three", b"four"])
    assert encoder.compared == 3
    monkeypatch.setattr(
        HybridEncoder,
        "encode",
        lambda self, texts: (np.zeros(len(texts), np.uint32), np.ones(len(texts), np.int64)),
    )
    _, encoder, _ = EncoderCache().get(paths["gpt2"], "auto", "text", first=3, offset=5000)
    with pytest.raises(EncoderMismatch):
        encoder.encode([b"one"])


# ---- the scan for listed code points


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=6),
    st.sets(st.integers(0x80, 0x10FFFF), max_size=5),
    st.data(),
)
def test_texts_with_a_code_point_are_found(
    texts: list[str], points: set[int], data: st.DataObject
) -> None:
    points = {p for p in points if not 0xD800 <= p < 0xE000}
    at = data.draw(st.lists(st.sampled_from(sorted(points)), max_size=3)) if points else []
    texts += [f"{'x' * (point % 11)}{chr(point)}{'y' * (point % 7)}" for point in at]
    expected = [i for i, text in enumerate(texts) if {*map(ord, text)} & points]
    assert (
        _index.CodePoints([(point, point) for point in sorted(points)]).within(
            [text.encode() for text in texts]
        )
        == expected
    )


def test_the_ends_of_ranges_and_of_texts() -> None:
    points = _index.CodePoints(
        [(0x80, 0x81), (0x7FF, 0x801), (0xFFFF, 0x10001), (0x10FFFF, 0x10FFFF)]
    )
    inside = [0x80, 0x81, 0x7FF, 0x800, 0x801, 0xFFFF, 0x10000, 0x10001, 0x10FFFF]
    outside = [0x41, 0x7F, 0x82, 0x7FE, 0x802, 0xFFFE, 0x10002, 0x10FFFE]
    for size in range(18):
        texts = [("a" * size + chr(point)).encode() for point in (*inside, *outside)]
        assert points.within(texts) == list(range(len(inside)))
    assert points.within([]) == [] and points.within([b"", b"abc"]) == []
    assert points.within([chr(0x7FF).encode()[:1], chr(0x10000).encode()[:3], b"\xff\xff"]) == [], (
        "cut off: nothing is read behind the end"
    )


@pytest.mark.parametrize("low_high", [(0x41, 0x90), (0x90, 0x80), (0x80, 0x110000)])
def test_what_is_no_range_is_refused(low_high: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a range must be"):
        _index.CodePoints([low_high])
    with pytest.raises(TypeError):
        _index.CodePoints([]).within(["a"])  # type: ignore[list-item]


def test_added_tokens_of_two_passes_must_not_overlap() -> None:
    def added(*tokens: tuple[str, bool]) -> str | None:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        listed = [
            {**plain, "id": 257 + number, "content": content, "special": special}
            for number, (content, special) in enumerate(tokens)
        ]
        return proved.unproved_reason(
            json.loads(tokenizer_json(KINDS["gpt2"], {}, added=listed)), "parse", VERSIONS
        )

    assert (
        added(("YZ", False), ("XY", True))
        == "its added tokens 'YZ' and 'XY' overlap and differ in special or normalized"
    )
    assert "overlap" in str(added(("XYZ", True), ("YZ", False)))
    assert (
        added(("YZ", True), ("XY", True)) is None
        and added(("<|end|>", True), ("   ", False)) is None
    )
