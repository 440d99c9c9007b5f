"""data-verify names whatever was done to prepared data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.pairs import write_documents
from trainkit.base.files import read_json, sha256_file, write_json
from trainkit.data.indexed import statistics as stats, verify
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.indexed.verify import verify_dataset, verify_pair
from trainkit.data.sums import file_sum
from trainkit.data.tokenizer import train_bpe

DOCUMENTS = [[5, 6, 0], [], [7, 0], [8, 9, 10, 0]]


@pytest.fixture(params=[1, 1000])
def prepared(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A dataset's folder, looked at in blocks of one and all at once."""
    monkeypatch.setattr(verify, "BLOCK", request.param)
    monkeypatch.setattr(stats, "DOCUMENTS", request.param)
    pair = write_documents(tmp_path / "d", DOCUMENTS)
    (tmp_path / "tokenizer.json").write_text("{}")
    sums = [("d.bin", 0, 10), ("d.bin", 10, 8), ("d.idx", 0, idx_path(pair).stat().st_size)]
    manifest = {
        "vocab_size": 300,
        "eod_id": 0,
        "documents": 4,
        "sequences": 3,
        "tokens": 9,
        "tokenizer_sha256": sha256_file(tmp_path / "tokenizer.json"),
        "checksums": [
            {"file": f, "start": s, "bytes": n, "xxh128": file_sum(tmp_path / f, s, n)}
            for f, s, n in sums
        ],
    }
    write_json(tmp_path / "dataset.json", manifest)
    return tmp_path


def problems(folder: Path, *, eod: bool = True) -> list[str]:
    found = verify_dataset(folder, read_json(folder / "dataset.json"), [folder / "d"], eod=eod)
    return [f"{Path(str(p.place)).name}: {p.message}" for p in found.problems]


def change(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


def test_a_sound_dataset(prepared: Path) -> None:
    found = verify_dataset(
        prepared, read_json(prepared / "dataset.json"), [prepared / "d"], eod=True
    )
    assert not found.problems
    assert (found.documents, found.sequences, found.tokens, found.checked_bytes) == (
        4,
        3,
        9,
        18 + idx_path(prepared / "d").stat().st_size,
    )


def edit_manifest(folder: Path, **values: Any) -> None:
    write_json(folder / "dataset.json", {**read_json(folder / "dataset.json"), **values})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        # an id above the vocabulary; the sum names its part of the file
        (
            lambda f: change(f / "d.bin", 14, b"\xff\xff"),
            [
                "d.bin: bytes 10 to 18: XXH128",
                "d.bin: token 7 is the id 65535, but the tokenizer has 300 ids (1 such",
            ],
        ),
        # the end of a document
        (
            lambda f: change(f / "d.bin", 4, b"\x09"),
            [
                "d.bin: bytes 0 to 10: XXH128",
                "d.bin: document 0 ends with the id 9, not with the end-of-document 0 (1 such",
            ],
        ),
        (
            lambda f: change(f / "d.bin", 16, b"\x09"),
            ["d.bin: bytes 10 to 18: XXH128", "d.bin: document 3 ends with the id 9"],
        ),
        # lengths that do not fit the offsets
        (
            lambda f: change(f / "d.idx", 34, b"\x02"),
            [
                "d.idx: bytes 0 to",
                "d.idx: sequence 1 begins at byte 6",
                "dataset.json: says 4 documents, the pairs hold 0",
            ],
        ),
        # cut off, and gone
        (
            lambda f: (f / "d.bin").write_bytes(b"12"),
            [
                "d.bin: bytes 0 to 10",
                "d.bin: bytes 10 to 18",
                "d.bin: has 2 bytes, dataset.json says 18",
            ],
        ),
        (lambda f: (f / "d.idx").unlink(), ["d.idx: No such file", "d.idx: No such file"]),
        (
            lambda f: (f / "tokenizer.json").write_text("{ }"),
            ["tokenizer.json: is not the tokenizer that the tokens were made with"],
        ),
        (lambda f: edit_manifest(f, tokens=10), ["dataset.json: says 10 tokens, the pairs hold 9"]),
        # sound, but of other documents
        (
            lambda f: write_documents(f / "d", [[1, 0]]),
            [
                "d.bin: bytes 0 to 10",
                "d.idx: bytes 0 to",
                "dataset.json: says 4 documents, the pairs hold 1",
            ],
        ),
    ],
)
def test_damage_is_named(
    prepared: Path, damage: Callable[[Path], object], expected: list[str]
) -> None:
    damage(prepared)
    found = problems(prepared)
    for words in expected:
        assert any(words in problem for problem in found), (words, found)


def test_all_problems_at_once(prepared: Path) -> None:
    change(prepared / "d.bin", 4, b"\x09")
    change(prepared / "d.bin", 12, b"\xff\xff")
    (prepared / "tokenizer.json").unlink()
    assert len(problems(prepared)) == 5


def test_documents_without_their_end(prepared: Path) -> None:
    write_documents(prepared / "d", [[5, 6], [7]])
    assert any(
        "document 0 ends with the id 6" in problem and "(2 such documents)" in problem
        for problem in problems(prepared)
    )
    assert not any("ends with" in problem for problem in problems(prepared, eod=False))


def test_ids_below_zero(tmp_path: Path) -> None:
    found = verify_pair(write_documents(tmp_path / "p", [[3, -1, 0]], "i4"), 300, 0)
    assert [p.message for p in found.problems] == [
        "token 1 is the id -1, but the tokenizer has 300 ids (1 such tokens)"
    ]


def test_real_tokenizers_count_special_tokens(tmp_path: Path) -> None:
    """The end-of-document's id is below the vocabulary's size."""
    tokenizer = train_bpe(iter(["a b c"]), 260, "<|endoftext|>")
    eod = tokenizer.token_to_id("<|endoftext|>")
    assert eod is not None
    prefix = write_documents(tmp_path / "p", [[*tokenizer.encode("a b").ids, eod]])
    assert not verify_pair(prefix, tokenizer.get_vocab_size(), eod).problems
    assert bin_path(prefix).stat().st_size > 2
