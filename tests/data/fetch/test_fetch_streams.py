"""Files read from a server as a stream, and tokens that are sent only where they belong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.data.fetch.served_file import BODY, NAME, SUM, of, quiet, refused, seen
from tests.data.fetch_server import QUICK, SECRET, Site, serve
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.fetch.retry import RemoteFileInfo
from trainkit.data.fetch.worker import fetch, open_stream


class TestTokens:
    def test_it_comes_from_the_environment_and_is_written_nowhere(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site.locked.add(NAME)
        error = refused(of(site, tmp_path, seen(site)))
        assert "401" in error.message and 'token = "HF_TOKEN"' in error.hint
        asked = of(site, tmp_path, seen(site), token="OUR_TOKEN")
        monkeypatch.delenv("OUR_TOKEN", raising=False)
        with pytest.raises(
            ConfigError, match="token = 'OUR_TOKEN': there is no such environment variable"
        ):
            fetch(asked, quiet, QUICK)
        monkeypatch.setenv("OUR_TOKEN", "hf_another_one")
        error = refused(asked)
        assert (
            "the token in OUR_TOKEN was not enough" in error.hint
            and "hf_another_one" not in str(error)
        )
        monkeypatch.setenv("OUR_TOKEN", SECRET)
        assert fetch(asked, quiet, QUICK).sha256 == SUM
        assert all(
            SECRET.encode() not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
        ) and SECRET not in json.dumps(asked.to_json())

    def test_another_host_does_not_see_it(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OUR_TOKEN", SECRET)
        with serve({"/store": BODY}) as store:
            site.redirects[NAME] = f"{store.url.replace('127.0.0.1', 'localhost')}/store"
            assert fetch(of(site, tmp_path, token="OUR_TOKEN"), quiet, QUICK).sha256 == SUM
            assert {a.authorization for a in store.asked} == {None} and {
                a.authorization for a in site.asked
            } == {f"Bearer {SECRET}"}

    def test_never_in_the_clear_to_another_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OUR_TOKEN", SECRET)
        assert (
            "readable on its way"
            in refused(
                FetchRecipe(
                    "http://files.example/x.jsonl",
                    tmp_path / "x.jsonl",
                    RemoteFileInfo(1),
                    token="OUR_TOKEN",
                )
            ).message
        )


class TestStreams:
    def test_a_local_file_and_one_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b"abc")
        with open_stream(tmp_path / "a.jsonl") as file:
            assert file.read(2) == b"ab" and file.read() == b"c"
        with (
            pytest.raises(ConfigError, match=r"b\.jsonl: No such file"),
            open_stream(tmp_path / "b.jsonl"),
        ):
            pass

    def test_a_kept_one_is_fetched(self, site: Site, tmp_path: Path) -> None:
        with open_stream(of(site, tmp_path, seen(site)), QUICK) as file:
            assert file.read() == BODY
        assert (tmp_path / "corpus/00.jsonl.zst").is_file()

    def test_a_stream_survives_breaks_and_leaves_nothing(self, site: Site, tmp_path: Path) -> None:
        site.cuts[NAME] = [1000, 0, 70_000]
        pieces = []
        with open_stream(
            of(site, tmp_path, RemoteFileInfo(len(BODY), seen(site).etag, sha256=SUM), keep=False),
            QUICK,
        ) as file:
            while piece := file.read(7919):
                pieces.append(piece)
        assert (
            b"".join(pieces) == BODY
            and max(map(len, pieces)) == 7919
            and list(tmp_path.iterdir()) == []
        )

    @pytest.mark.parametrize(
        ("known", "words"),
        [
            (RemoteFileInfo(len(BODY), sha256="0" * 64), "SHA-256 is"),
            (RemoteFileInfo(len(BODY) - 5), "no longer the file"),
        ],
    )
    def test_a_stream_is_verified(
        self, known: RemoteFileInfo, words: str, site: Site, tmp_path: Path
    ) -> None:
        with (
            pytest.raises(TrainkitError, match=words),
            open_stream(of(site, tmp_path, known, keep=False), QUICK) as file,
        ):
            file.read()

    def test_a_stream_may_be_left_early(self, site: Site, tmp_path: Path) -> None:
        with open_stream(
            of(site, tmp_path, RemoteFileInfo(len(BODY), sha256="0" * 64), keep=False), QUICK
        ) as file:
            assert file.read(10) == BODY[:10]

    def test_what_is_read_from_its_end_lies_here_meanwhile(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.files["/enwik8.zip"] = BODY
        asked = FetchRecipe(f"{site.url}/enwik8.zip", tmp_path / "enwik8.zip", keep=False)
        with open_stream(asked, QUICK) as file:
            file.seek(-3, os.SEEK_END)
            assert file.read() == BODY[-3:]
        assert not (tmp_path / "enwik8.zip").exists()
