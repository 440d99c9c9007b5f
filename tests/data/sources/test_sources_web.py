"""What the servers have of a dataset's urls: every file found and counted, or a word about which
is missing."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.data.fetch_server import QUICK, Site, fetched
from tests.data.sources.web_datasets import WEB, refused, run, web
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.data.fetch.hub import HubPath, parse_hub_address as parse_hub
from trainkit.data.fetch.recipe import FetchRecipe, ListingSpec, fetch_spec_from_json
from trainkit.data.fetch.retry import look
from trainkit.data.fetch.worker import fetch, work
from trainkit.data.sources import Shard, download_notice, fetch_units, listing as listing_module
from trainkit.data.sources.address import addresses_of, local_names
from trainkit.data.sources.announce import DownloadNotice
from trainkit.data.sources.listing import LISTING

pytestmark = pytest.mark.usefixtures("quick")


class TestWeb:
    def test_the_pile_s_thirty_files(self, site: Site, tmp_path: Path) -> None:
        dataset = web(f"{site.url}/train/{{00..29}}.jsonl.zst", files=30, download_bytes=465)
        shards = run(dataset, tmp_path)
        assert [s.path.name for s in shards] == [
            f"{i:02d}.jsonl.zst" for i in range(30)
        ] and shards[7].path == tmp_path / "07.jsonl.zst"
        assert [s.size for s in shards] == list(range(1, 31)) and [s.name for s in shards] == [
            f"{i:05d}" for i in range(30)
        ]
        assert all(s.path.read_bytes() == bytes([i]) * (i + 1) for i, s in enumerate(shards))

    def test_listed_once_and_the_same_from_then_on(self, site: Site, tmp_path: Path) -> None:
        dataset = web(f"{site.url}/train/{{00..02}}.jsonl.zst", f"{site.url}/train/29.jsonl.zst")
        shards = run(dataset, tmp_path)
        site.asked.clear()
        assert WEB.shards(dataset, tmp_path) == shards and site.asked == []
        assert [u.name for u in fetch_units(dataset, tmp_path, shards)] == [
            "listing",
            "fetch-00000",
            "fetch-00001",
            "fetch-00002",
            "fetch-00003",
        ]
        assert WEB.shards(dataset, tmp_path, refresh=True) == shards and len(site.asked) == 4
        changed = dataset.model_copy(update={"urls": dataset.urls[:1]})
        assert len(WEB.shards(changed, tmp_path)) == 3 and len(site.asked) == 7
        (tmp_path / LISTING).write_text('{"schema": "listing/1", "of": ')
        site.asked.clear()
        assert WEB.shards(dataset, tmp_path) == shards and len(site.asked) == 4

    def test_keys_that_say_nothing_of_the_files_do_not_list_anew(
        self, site: Site, tmp_path: Path
    ) -> None:
        dataset = web(f"{site.url}/train/00.jsonl.zst")
        run(dataset, tmp_path)
        site.asked.clear()
        WEB.shards(
            dataset.model_copy(
                update={
                    "licence": "x",
                    "split": "1,1,1",
                    "text_key": "body",
                    "accept_download": True,
                }
            ),
            tmp_path,
        )
        assert site.asked == []

    def test_a_missing_shard_is_named(self, site: Site, tmp_path: Path) -> None:
        for i in (4, 17):
            del site.files[f"/train/{i:02d}.jsonl.zst"]
        error = refused(web(f"{site.url}/train/{{00..29}}.jsonl.zst"), tmp_path / "corpus")
        names = f"{site.url}/train/04.jsonl.zst, {site.url}/train/17.jsonl.zst"
        assert f"2 of 30 files are not there: {names}" in str(
            error
        ) and "missing_files = 'allow', files = N" in str(error)

    def test_trap_16_addresses_without_a_file_are_counted_not_passed_over(
        self, site: Site, tmp_path: Path
    ) -> None:
        """SlimPajama in miniature: 10 chunks of 12 addresses, of which 113 exist; one that is
        busy (429) is asked again, and one lost is missed."""
        shapes = [12, 12, 11, 12, 10, 12, 12, 11, 12, 9]
        names = [
            f"/train/chunk{c}/example_train_{i}.jsonl.zst"
            for c, n in enumerate(shapes, 1)
            for i in range(n)
        ]
        site.files.clear()
        site.files.update(dict.fromkeys(names, b"x"))
        site.answers = {
            names[5]: [(429, {})],
            names[100]: [(503, {})],
            names[110]: [(429, {"Retry_After": "1"})],
        }
        urls = f"{site.url}/train/chunk{{1..10}}/example_train_{{0..11}}.jsonl.zst"
        shards = WEB.shards(web(urls, files=113, missing_files="allow"), tmp_path / "corpus")
        assert len(shards) == 113 and [s.path for s in shards] == [
            tmp_path / "corpus" / n.removeprefix("/train/") for n in names
        ]
        del site.files[names[77]]
        error = refused(web(urls, files=113, missing_files="allow"), tmp_path / "corpus")
        assert "112 files are there, files = 113 were published; not there: " in str(
            error
        ) and "and 3 more" in str(error)
        assert "8 of 120 files are not there" in str(refused(web(urls), tmp_path / "corpus"))
        site.files[names[77]] = site.files["/train/chunk10/example_train_11.jsonl.zst"] = b"x"
        assert "114 files are there, files = 113" in str(
            refused(web(urls, files=113, missing_files="allow"), tmp_path / "corpus")
        )

    def test_a_server_that_stays_busy_fails_and_loses_no_file(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.answers["/train/03.jsonl.zst"] = [(429, {})] * 100
        error = refused(
            web(f"{site.url}/train/{{00..29}}.jsonl.zst", files=29, missing_files="allow"),
            tmp_path / "corpus",
        )
        assert "03.jsonl.zst" in error.message and "429" in error.message

    def test_questions_are_parallel_and_bounded(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, most, lock = 0, 0, threading.Lock()
        original = look

        def counted(*args: Any) -> Any:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            answer = original(*args)
            with lock:
                now -= 1
            return answer

        monkeypatch.setattr(listing_module, "look", counted)
        monkeypatch.setattr(listing_module, "AT_ONCE", 4)
        assert len(WEB.shards(web(f"{site.url}/train/{{00..29}}.jsonl.zst"), tmp_path)) == 30
        assert 2 <= most <= 4

    def test_a_server_that_takes_no_head(self, site: Site, tmp_path: Path) -> None:
        site.no_head = True
        assert [
            s.size for s in WEB.shards(web(f"{site.url}/train/{{00..29}}.jsonl.zst"), tmp_path)
        ] == list(range(1, 31))
        assert "not there" in str(
            refused(web(f"{site.url}/train/{{00..30}}.jsonl.zst"), tmp_path / "corpus")
        )

    def test_sizes_are_those_published(self, site: Site, tmp_path: Path) -> None:
        error = refused(
            web(f"{site.url}/train/{{00..29}}.jsonl.zst", download_bytes=466), tmp_path / "corpus"
        )
        assert "datasets.d.download_bytes = 466 was published, 465 are there" in str(error)

    def test_sums_travel_with_the_file(self, site: Site, tmp_path: Path) -> None:
        sums = tuple(
            hashlib.sha256(site.files[f"/train/0{i}.jsonl.zst"]).hexdigest() for i in range(2)
        )
        urls = [f"{site.url}/train/0{i}.jsonl.zst" for i in range(2)]
        run(web(*urls, sha256=(sums[0], sums[1].upper())), tmp_path / "right")
        with pytest.raises(TrainkitError, match=r"01\.jsonl\.zst: SHA-256 is"):
            run(web(*urls, sha256=(sums[0], sums[0])), tmp_path / "wrong")
        assert "cannot have one sha256" in str(
            refused(web(f"{site.url}/{{0..1}}.jsonl", sha256=sums[:1]), tmp_path / "corpus")
        )
        assert "is not a SHA-256" in str(
            refused(web(urls[0], sha256=("abc",)), tmp_path / "corpus")
        )

    def test_not_kept_they_need_no_unit(self, site: Site, tmp_path: Path) -> None:
        dataset = web(f"{site.url}/train/{{00..02}}.jsonl.zst", keep_download=False)
        shards = run(dataset, tmp_path)
        assert (
            [u.name for u in fetch_units(dataset, tmp_path, shards)] == ["listing"]
            and not shards[0].path.exists()
            and isinstance(shards[0].recipe, FetchRecipe)
            and not shards[0].recipe.keep
        )

    def test_files_of_this_machine_are_read_where_they_are(
        self, site: Site, tmp_path: Path
    ) -> None:
        (tmp_path / "a.jsonl").write_bytes(b"{}")
        shards = WEB.shards(
            web(f"file://{tmp_path}/*.jsonl", f"{site.url}/train/00.jsonl.zst"), tmp_path / "corpus"
        )
        assert (
            shards[0] == Shard("00000", tmp_path / "a.jsonl", 2)
            and shards[1].path == tmp_path / "corpus/00.jsonl.zst"
        )
        units = fetch_units(web(f"file://{tmp_path}/*.jsonl"), tmp_path / "corpus", shards)
        assert [f["text"] for f in listed_files(units[0].spec)] == [
            f"file://{tmp_path}/a.jsonl",
            f"{site.url}/train/00.jsonl.zst",
        ]
        assert "1 of 1 files are not there" in str(
            refused(web(f"file://{tmp_path}/b.jsonl"), tmp_path / "corpus")
        )

    def test_a_name_that_no_text_has_is_refused_before_it_is_fetched(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.files["/x.csv"] = b"a,b"
        assert "x.csv is of no format that is read" in str(
            refused(web(f"{site.url}/x.csv"), tmp_path / "corpus")
        )


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("plain/path.jsonl", "is not an address"),
            ("https://", "is not an address"),
            ("https://user:password@host/x.jsonl", "holds a user's name"),
            ("hf://datasets/only-a-name/x.jsonl", "names no file of a hub"),
            ("hf://datasets/a/../x", "names no file of a hub"),
            ("file://relative/x.jsonl", "is relative"),
        ],
    )
    def test_refused(self, url: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            addresses_of(web(url))
        assert "password" not in str(error.value) and error.value.exit == 6

    def test_twice(self) -> None:
        with pytest.raises(ConfigError, match="named twice"):
            addresses_of(web("https://h/{1..3}.jsonl", "https://h/2.jsonl"))

    def test_sixty_thousand(self) -> None:
        found = addresses_of(
            web("https://hub.example/train/chunk{1..10}/example_train_{0..5999}.jsonl.zst")
        )
        names = local_names([a.text for a in found])
        assert (
            len(set(names)) == 60_000
            and names[0] == "chunk1/example_train_0.jsonl.zst"
            and names[-1] == "chunk10/example_train_5999.jsonl.zst"
        )

    @pytest.mark.parametrize(
        ("texts", "names"),
        [
            (["https://h/a/b/c.jsonl"], ["c.jsonl"]),
            (["https://h/a/1/x.zst", "https://h/a/2/x.zst"], ["1/x.zst", "2/x.zst"]),
            (["https://h/x.zst", "http://h/x.zst"], ["https/h/x.zst", "http/h/x.zst"]),
            (["https://h/a%20b.zst?download=true"], ["a b.zst"]),
            (["https://h/a%2Fb.zst", "https://h//c.zst"], ["a%2Fb.zst", "c.zst"]),
            (["s3://bucket/k/x.zst", "s3://bucket/x.zst"], ["k/x.zst", "x.zst"]),
            ([], []),
        ],
    )
    def test_names_below_the_corpus(self, texts: list[str], names: list[str]) -> None:
        assert local_names(texts) == names

    @pytest.mark.parametrize(
        "texts",
        [
            ["https://h/../x"],
            ["https://h/a/%2e%2e/x", "https://h/b"],
            ["https://h/.fetch/x", "https://h/y"],
            ["https://h/" + "x" * 201],
        ],
    )
    def test_names_that_lead_elsewhere(self, texts: list[str]) -> None:
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            local_names(texts)

    def test_two_of_one_name(self) -> None:
        with pytest.raises(ConfigError, match="would both be kept as x"):
            local_names(["https://h/x?part=1", "https://h/x?part=2"])

    def test_of_a_hub(self) -> None:
        assert parse_hub("hf://datasets/a/b/c/d.jsonl") == HubPath(
            "dataset", "a/b", "main", "c/d.jsonl"
        )
        assert parse_hub("hf://a/b@v1.0/tokenizer.json") == HubPath(
            "model", "a/b", "v1.0", "tokenizer.json"
        )
        assert parse_hub("hf://datasets/a/b@refs/convert/parquet/x/0.parquet") == HubPath(
            "dataset", "a/b", "refs/convert/parquet", "x/0.parquet"
        )


def listed_files(spec: Mapping[str, object]) -> list[dict[str, str]]:
    found = fetch_spec_from_json(spec)
    assert isinstance(found, ListingSpec)
    return list(found.listing["files"])


class TestAnnouncement:
    def shards(self, tmp_path: Path, size: int) -> list[Shard]:
        return [
            Shard(
                "0",
                tmp_path / "corpus/a.zst",
                9_000_000_000,
                FetchRecipe("https://h/a.zst", tmp_path / "a"),
            ),
            Shard(
                "1", tmp_path / "corpus/b.zst", size, FetchRecipe("https://h/b.zst", tmp_path / "b")
            ),
        ]

    def test_small_downloads_start_without_a_word(self, tmp_path: Path) -> None:
        dataset = web("https://h/x.jsonl", licence="CC0")
        assert download_notice(dataset, tmp_path, self.shards(tmp_path, 1_000_000_000)) is None
        shards = self.shards(tmp_path, 1_000_000_001)
        assert download_notice(dataset, tmp_path, shards) is not None
        (tmp_path / "corpus").mkdir()
        shards[1].path.write_bytes(b"it is here")
        assert download_notice(dataset, tmp_path, shards) is None
        assert (
            download_notice(dataset, tmp_path, [Shard("0", tmp_path / "a.jsonl", 10**12)]) is None
        )
        unknown = [
            Shard("0", tmp_path / "c.zst", 0, FetchRecipe("https://h/c.zst", tmp_path / "c.zst"))
        ]
        assert download_notice(dataset, tmp_path, unknown) is None
        told = download_notice(
            dataset.model_copy(update={"download_bytes": 15_000_000_000}), tmp_path, unknown
        )
        assert told is not None and told.bytes == 15_000_000_000

    def test_large_ones_say_size_and_licence(self, tmp_path: Path) -> None:
        dataset = web("https://h/x.jsonl", licence="CC0", homepage="https://about.example")
        found = download_notice(
            dataset, tmp_path / "not/there/yet", self.shards(tmp_path, 81_000_000_000)
        )
        assert found is not None and not found.accepted
        assert (
            "d: 2 files, 90 GB" in str(found)
            and "licence: CC0" in str(found)
            and "https://about.example" in str(found)
        )
        refusal = found.refusal()
        assert (
            refusal.exit == 6
            and "accept_download = true in [datasets.d]" in str(refusal)
            and "licence: CC0" in str(refusal)
        )
        yes = download_notice(
            dataset.model_copy(update={"accept_download": True, "licence": None}),
            tmp_path,
            self.shards(tmp_path, 81_000_000_000),
        )
        assert yes is not None and yes.accepted and "not stated" in str(yes)

    def test_room(self, tmp_path: Path) -> None:
        words: dict[str, Any] = {
            "dataset": "d",
            "files": 1,
            "bytes": 100,
            "licence": None,
            "homepage": None,
            "accepted": True,
        }
        DownloadNotice(**words, free=100).check_space()
        DownloadNotice(**words, free=None).check_space()
        with pytest.raises(ConfigError, match="does not fit there"):
            DownloadNotice(**words, free=99).check_space()
        found = download_notice(
            web("https://h/x.jsonl", keep_download=False), tmp_path, self.shards(tmp_path, 10**15)
        )
        assert found is not None and found.free is None
        kept = download_notice(web("https://h/x.jsonl"), tmp_path, self.shards(tmp_path, 10**15))
        assert (
            kept is not None and abs((kept.free or 0) - shutil.disk_usage(tmp_path).free) < 10**10
        )


def test_what_changed_on_the_server_is_listed_anew_by_the_next_call(
    site: Site, tmp_path: Path
) -> None:
    dataset = web(f"{site.url}/train/{{00..02}}.jsonl.zst")
    shards = WEB.shards(dataset, tmp_path)
    listing, *units = fetch_units(dataset, tmp_path, shards)
    work(listing.spec, lambda done, total: None)
    site.files["/train/01.jsonl.zst"] = b"another text"
    work(units[0].spec, lambda done, total: None)
    with pytest.raises(
        TrainkitError, match=r"01\.jsonl\.zst is no longer the file that was listed"
    ):
        fetch(fetched(shards[1]), lambda done, total: None, QUICK)
    again = run(dataset, tmp_path)
    assert (
        again[1].path.read_bytes() == b"another text"
        and again[0] == shards[0]
        and again[1] != shards[1]
    )
    assert len(site.gets("/train/00.jsonl.zst")) == 1
