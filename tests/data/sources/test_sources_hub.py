"""What a hub has of a dataset, indexed pairs that are fetched, and what is published of a dataset
beside what came."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.fetch_server import SECRET, HubSite, fetched, serve, serve_hub
from tests.data.sources.web_datasets import WEB, refused, run, web
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.published import check_published, tolerance
from trainkit.data.sources import fetched_prefixes
from trainkit.data.sources.listing import LISTING
from trainkit.jobs.schema import Dataset

pytestmark = pytest.mark.usefixtures("quick")


IN_HUB = {
    f"train/chunk{c}/example_train_{i}.jsonl.zst": bytes([c, i]) * 50
    for c in (1, 2)
    for i in range(8)
}


class TestHub:
    @pytest.fixture
    def hub(self) -> Iterator[HubSite]:
        with serve_hub(dict(IN_HUB), large=set(IN_HUB), page=3) as hub:
            yield hub

    def dataset(
        self,
        hub: HubSite,
        path: str = "train/chunk{1..2}/example_train_{0..7}.jsonl.zst",
        at: str = "",
        **words: Any,
    ) -> Dataset:
        return web(f"hf://datasets/org/corpus{at}/{path}", endpoint=hub.url, **words)

    def test_pages_sizes_and_sums(self, hub: HubSite, tmp_path: Path) -> None:
        shards = run(self.dataset(hub, files=16, download_bytes=1600), tmp_path)
        assert {str(s.path.relative_to(tmp_path)): s.path.read_bytes() for s in shards} == {
            n.removeprefix("train/"): c for n, c in IN_HUB.items()
        }
        assert all(
            (known := fetched(s).known) is not None
            and known.sha256 == hashlib.sha256(s.path.read_bytes()).hexdigest()
            for s in shards
        )
        # the commit, and three pages a folder
        assert sum(a.path.startswith("/api") for a in hub.asked) == 1 + 2 * 3
        assert all(f"/resolve/{hub.commit}/" in fetched(s).url for s in shards)

    def test_the_branch_moves_and_the_listing_stays(self, hub: HubSite, tmp_path: Path) -> None:
        shards = run(self.dataset(hub), tmp_path)
        hub.commit = "2" * 40
        assert WEB.shards(self.dataset(hub), tmp_path) == shards
        (tmp_path / LISTING).unlink()
        hub.files["train/chunk1/example_train_3.jsonl.zst"] = b"newer"
        hub.asked.clear()
        run(self.dataset(hub), tmp_path)
        assert (tmp_path / "chunk1/example_train_3.jsonl.zst").read_bytes() == b"newer"
        assert [a.path for a in hub.asked if "/resolve/" in a.path] == [
            f"/datasets/org/corpus/resolve/{'2' * 40}/train/chunk1/example_train_3.jsonl.zst"
        ]

    def test_a_pattern(self, hub: HubSite, tmp_path: Path) -> None:
        shards = WEB.shards(self.dataset(hub, "train/chunk2/*_[1-3].jsonl.zst", files=3), tmp_path)
        assert [s.path.name for s in shards] == [f"example_train_{i}.jsonl.zst" for i in (1, 2, 3)]
        assert "1 of 1 files are not there" in str(
            refused(self.dataset(hub, "train/chunk3/*.jsonl.zst"), tmp_path / "corpus")
        )

    def test_slimpajama_whole(self, tmp_path: Path) -> None:
        """60,000 addresses for 59,166 files in 60 pages: counted before a byte is fetched, never
        a constant (traps 15 and 16)."""
        shapes = [5912, 5911, 5918, 5917, 5910, 5920, 5914, 5921, 5924, 5919]
        files = {
            f"train/chunk{c}/example_train_{i}.jsonl.zst": b"x"
            for c, n in enumerate(shapes, 1)
            for i in range(n)
        }
        urls = "train/chunk{1..10}/example_train_{0..5999}.jsonl.zst"
        with serve_hub(files) as hub:
            shards = WEB.shards(
                self.dataset(hub, urls, missing_files="allow", files=59_166), tmp_path / "corpus"
            )
            assert (
                len(shards) == 59_166
                and len({s.path for s in shards}) == 59_166
                and len(hub.asked) == 61
            )
            del files["train/chunk4/example_train_4000.jsonl.zst"]
            fourth = urls.replace("{1..10}", "4")
            error = refused(
                self.dataset(hub, fourth, missing_files="allow", files=5917), tmp_path / "corpus"
            )
            assert "5,916 files are there, files = 5,917" in str(error)

    def test_terms_and_tokens(
        self, hub: HubSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The token goes to the hub, not to the store it sends one on to; nothing here holds it."""
        hub.gated = True
        assert "is gated" in str(refused(self.dataset(hub), tmp_path / "corpus"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert "there is no such environment variable" in str(
            refused(self.dataset(hub, token="HF_TOKEN"), tmp_path / "corpus")
        )
        assert {a.authorization for a in hub.asked} == {None}
        monkeypatch.setenv("HF_TOKEN", SECRET)
        hub.asked.clear()
        run(self.dataset(hub, token="HF_TOKEN"), tmp_path / "corpus")
        assert {a.authorization for a in hub.asked if not a.path.startswith("/store")} == {
            f"Bearer {SECRET}"
        }
        assert {a.authorization for a in hub.asked if a.path.startswith("/store")} == {None}
        assert all(
            SECRET.encode() not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
        )

    def test_a_token_that_lies_around_is_not_used(
        self, hub: HubSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", SECRET)
        WEB.shards(self.dataset(hub), tmp_path)
        assert {a.authorization for a in hub.asked} == {None}

    def test_words(self, hub: HubSite, tmp_path: Path) -> None:
        assert "no such revision" in str(refused(self.dataset(hub, at="@v9"), tmp_path / "corpus"))
        assert "knows no such dataset" in str(
            refused(web("hf://datasets/org/corpse/x.jsonl", endpoint=hub.url), tmp_path / "corpus")
        )
        assert "pattern: hf://datasets/org/corpus/train/chunk1/*.parquet" in str(
            refused(self.dataset(hub, "train/chunk1"), tmp_path / "corpus")
        )
        hub.answers["/api"] = [(429, {"Retry_After": "0"}), (503, {})]
        assert len(WEB.shards(self.dataset(hub), tmp_path)) == 16

    def test_small_files_have_no_sum_and_addresses_of_the_hub_s_pages_have_one(
        self, hub: HubSite, tmp_path: Path
    ) -> None:
        """https:// addresses of a hub, as people paste them: HEAD tells size and sum."""
        hub.large.remove("train/chunk1/example_train_0.jsonl.zst")
        folder = f"{hub.url}/datasets/org/corpus/resolve/main/train/chunk1"
        urls = f"{folder}/example_train_{{0..1}}.jsonl.zst"
        small, large = run(web(urls), tmp_path)
        assert (
            (known := fetched(small).known) is not None
            and known.sha256 is None
            and (known := fetched(large).known) is not None
            and known.sha256 == hashlib.sha256(large.path.read_bytes()).hexdigest()
        )

    def test_two_sums_that_differ(self, hub: HubSite, tmp_path: Path) -> None:
        error = refused(
            self.dataset(hub, "train/chunk1/example_train_0.jsonl.zst", sha256=("0" * 64,)),
            tmp_path / "corpus",
        )
        assert "sha256 says 0000" in str(error)


class TestIndexed:
    def test_pairs_are_fetched_and_found_again_without_a_server(self, tmp_path: Path) -> None:
        files = {
            f"/p/my-gpt3_0{i}_text_document.{end}": bytes([i])
            for i in range(3)
            for end in ("bin", "idx")
        }
        with serve(files) as site:
            urls = tuple(
                f"{site.url}/p/my-gpt3_{{00..02}}_text_document.{end}" for end in ("idx", "bin")
            )
            dataset = web(*urls, source="indexed", name="pairs")
            with pytest.raises(ConfigError, match="was not fetched"):
                fetched_prefixes(dataset, tmp_path)
            run(dataset, tmp_path)
        expected = [tmp_path / f"my-gpt3_0{i}_text_document" for i in range(3)]
        assert (
            fetched_prefixes(dataset, tmp_path) == expected
            and expected[2].with_suffix(".bin").read_bytes() == b"\2"
        )

    def test_half_a_pair(self, tmp_path: Path) -> None:
        with serve({"/x.idx": b"", "/x.bin": b"", "/y.bin": b"", "/z.txt": b""}) as site:
            assert "y.bin comes without y.idx" in str(
                refused(
                    web(
                        f"{site.url}/x.idx",
                        f"{site.url}/x.bin",
                        f"{site.url}/y.bin",
                        source="indexed",
                    ),
                    tmp_path / "c",
                )
            )
            assert "neither in .bin nor in .idx" in str(
                refused(web(f"{site.url}/z.txt", source="indexed"), tmp_path / "c")
            )
            assert "keep_download" in str(
                refused(
                    web(
                        f"{site.url}/x.idx",
                        f"{site.url}/x.bin",
                        source="indexed",
                        keep_download=False,
                    ),
                    tmp_path / "c",
                )
            )


class TestPublished:
    @pytest.mark.parametrize(
        ("number", "allowed"),
        [
            (36_445_475, 0),
            (517_401, 0),
            (17_103_000, 171_030),
            (457_414_000_000, 4_574_140_000),
            (945_000_000, 47_250_000),
            (300, 15),
            (30, 1),
            (7, 0),
        ],
    )
    def test_a_round_number_was_rounded(self, number: int, allowed: int) -> None:
        assert tolerance(number) == allowed

    def test_every_wrong_number_is_named(self) -> None:
        dataset = web("https://h/x.jsonl", documents=100_001, text_bytes=500_000_001, tokens=7)
        check_published(dataset, {"documents": 100_001, "text_bytes": 500_000_001})
        with pytest.raises(ConfigError) as error:
            check_published(dataset, {"documents": 99_999, "text_bytes": 500_000_001, "tokens": 8})
        assert len(
            error.value.list
        ) == 2 and "documents = 100,001 was published, 99,999 are there" in str(error.value)
