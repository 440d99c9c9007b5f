"""Tokenizers' files: fetched where they are published, and GPT-2's two made into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.fetch_server import SECRET, serve, serve_hub
from tests.shared import MISSING, golden
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.data.fetch.worker import work
from trainkit.data.sources import tokenizer_fetch_units
from trainkit.data.tokenizer import gpt2_bpe, plain
from trainkit.jobs.schema import Tokenizer


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def small(
    folder: Path, merges: str = "#version: 0.2\nh e\nl l\nhe ll\nĠ w\n# #\n"
) -> tuple[Path, Path]:
    """A vocabulary of all bytes, five merges and the end."""
    joined = [
        line.replace(" ", "") for line in merges.splitlines() if not line.startswith("#version")
    ]
    tokens = [*alphabet(), *joined, "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8"
    )
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


def gpt2(folder: Path, vocab_url: str | None = None, merge_url: str | None = None) -> Tokenizer:
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    return Tokenizer(
        name="gpt2",
        type="gpt2",
        vocab_file=files[0],
        merge_file=files[1],
        vocab_url=vocab_url,
        merge_url=merge_url,
    )


def run(units: Any) -> None:
    for unit in units:
        work(json.loads(json.dumps(unit.spec)), lambda done, total: None)
        assert all(path.is_file() for path in unit.outputs)


class TestFetches:
    def test_each_file_that_says_where_it_is_published(self, tmp_path: Path) -> None:
        with serve({"/vocab.json": b"{}", "/merges.txt": b"#"}) as site:
            units = tokenizer_fetch_units(
                gpt2(
                    tmp_path, vocab_url=f"{site.url}/vocab.json", merge_url=f"{site.url}/merges.txt"
                )
            )
            assert [u.name for u in units] == ["fetch-vocab-file", "fetch-merge-file"]
            run(units)
            assert (tmp_path / "vocab.json").read_bytes() == b"{}" and (
                tmp_path / "merges.txt"
            ).read_bytes() == b"#"
            asked = len(site.asked)
            run(units)
            assert len(site.asked) == asked
        assert (
            tokenizer_fetch_units(gpt2(tmp_path)) == []
            and tokenizer_fetch_units(Tokenizer(name="t", vocab_size=300)) == []
        )

    def test_a_file_that_is_there_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text("mine")
        with serve({"/t.json": b"theirs"}) as site:
            run(
                tokenizer_fetch_units(
                    Tokenizer(name="t", type="file", path=str(path), url=f"{site.url}/t.json")
                )
            )
            assert path.read_text() == "mine" and site.asked == []

    def test_a_missing_one_and_a_page(self, tmp_path: Path) -> None:
        with serve({"/page": b"<html>"}) as site:
            site.types["/page"] = "text/html"
            for name, words in (("nothing", "no such file"), ("page", "a web page instead")):
                with pytest.raises(TrainkitError, match=words):
                    run(
                        tokenizer_fetch_units(
                            Tokenizer(
                                name="t",
                                type="file",
                                path=str(tmp_path / "t.json"),
                                url=f"{site.url}/{name}",
                            )
                        )
                    )
                assert not (tmp_path / "t.json").exists()

    def test_of_a_hub_behind_terms(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", SECRET)
        tokenizer = Tokenizer(
            name="llama3",
            type="file",
            path=str(tmp_path / "t.json"),
            url="hf://meta/llama@v1/original/tokenizer.json",
        )
        with serve_hub(
            {"original/tokenizer.json": b"{}"},
            kind="models",
            name="meta/llama",
            revisions={"v1"},
            gated=True,
        ) as hub:
            with pytest.raises(TrainkitError, match="401") as error:
                run(tokenizer_fetch_units(tokenizer, endpoint=hub.url))
            assert "terms" in error.value.hint
            run(tokenizer_fetch_units(tokenizer, token="HF_TOKEN", endpoint=hub.url))
        assert (tmp_path / "t.json").read_bytes() == b"{}"

    def test_a_path_is_no_url(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"tokenizers\.t\.url = 'some/file' is not an address"
        ):
            tokenizer_fetch_units(
                Tokenizer(name="t", type="file", path=str(tmp_path / "t.json"), url="some/file")
            )


def test_gpt2_from_its_two_published_files(tmp_path: Path) -> None:
    """28 texts with white space, other scripts, contractions and control characters, encoded by
    two other implementations."""
    found = golden()
    if found is None or not (found.parent / "gpt2-vocab.json").is_file():
        pytest.skip(MISSING)
    with serve(
        {
            f"/{name}": (found.parent / f"gpt2-{name}").read_bytes()
            for name in ("vocab.json", "merges.txt")
        }
    ) as site:
        run(
            tokenizer_fetch_units(
                gpt2(
                    tmp_path, vocab_url=f"{site.url}/vocab.json", merge_url=f"{site.url}/merges.txt"
                )
            )
        )
    encoder = gpt2_bpe(tmp_path / "vocab.json", tmp_path / "merges.txt", "<|endoftext|>")
    encoder.encode_special_tokens = True
    rows = json.loads((found / "gpt2_ids.json").read_text(encoding="utf-8"))
    assert [encoder.encode(row["text"], add_special_tokens=False).ids for row in rows] == [
        row["ids"] for row in rows
    ] and len(rows) >= 28
    assert encoder.get_vocab_size() == 50257 and encoder.token_to_id("<|endoftext|>") == 50256


def test_files_of_another_system_and_not_in_place_of_each_other(tmp_path: Path) -> None:
    """Lines that end in CR LF; and trap 11, the vocabulary in place of the merges."""
    vocab, merges = small(tmp_path)
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    encoder = gpt2_bpe(vocab, merges, "<|endoftext|>")
    encoder.encode_special_tokens = True
    assert encoder.encode("hello w##").tokens == ["hell", "o", "Ġw", "##"]
    text = "it's\n\n  tabs\té \U0001f642"
    assert encoder.decode(encoder.encode(text).ids) == text
    with pytest.raises(ConfigError, match=r"merges\.txt") as error:
        gpt2_bpe(vocab, vocab, "<|endoftext|>")
    assert error.value.exit == 6


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            (
                "data did not match any variant of untagged enum PreTokenizerUntagged at line 1"
                " column 128"
            ),
            "its pre_tokenizer is of a type, or has fields, that this",
        ),
        (
            "data did not match any variant of untagged enum ModelWrapper at line 3 column 5",
            "that this library does not know at line 3 column 5",
        ),
        ("No such file or directory (os error 2)", "No such file or directory"),
        (
            "invalid type: sequence, expected struct Tokenizer at line 1 column 2",
            "invalid type: sequence at line 1 column 2",
        ),
        (
            (
                "Failed to parse: missing field `model` at line 1\n\n\t{}\n\t.^\n\n\nLocation:\n   "
                " src/load_tokenizer/hf.rs:250:44"
            ),
            "missing field `model` at line 1",
        ),
    ],
)
def test_a_librarys_words_come_without_its_source(said: str, words: str) -> None:
    found = plain(Exception(said))
    assert words in found and not any(
        part in found for part in (".rs", "untagged", "os error", "struct", "\n")
    )
