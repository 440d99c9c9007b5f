"""Files fetched from a web server over real sockets: whole, right and resumed, or an error that
says what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forkserver
from tests.conftest import wait_for
from tests.data.fetch.served_file import BODY, NAME, SUM, of, quiet, refused, seen
from tests.data.fetch_server import DATE, QUICK, Site, serve
from trainkit.base.errors import TrainkitError
from trainkit.data.fetch.object_store import file_system
from trainkit.data.fetch.recipe import FetchRecipe, FetchResult
from trainkit.data.fetch.retry import RemoteFileInfo, ServerGate
from trainkit.data.fetch.worker import fetch, open_stream, work


def left(tmp_path: Path) -> set[str]:
    return {
        str(p.relative_to(tmp_path / "corpus"))
        for p in (tmp_path / "corpus").rglob("*")
        if p.is_file()
    }


def test_a_file_comes_whole_and_only_once(site: Site, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    asked = of(site, tmp_path, seen(site))
    result = fetch(asked, lambda done, total: told.append((done, total)), QUICK)
    assert (
        result.to_json() == {"bytes": len(BODY), "sha256": SUM} and asked.path.read_bytes() == BODY
    )
    assert told[-1] == (len(BODY), len(BODY)) and told == sorted(told)
    assert left(tmp_path) == {"00.jsonl.zst", ".fetch/00.jsonl.zst.json"}
    site.asked.clear()
    assert fetch(asked, quiet, QUICK) == result and site.asked == []


def test_without_a_listing_the_server_is_asked_first(site: Site, tmp_path: Path) -> None:
    assert fetch(of(site, tmp_path), quiet, QUICK).sha256 == SUM
    assert [a.method for a in site.asked] == ["HEAD", "GET"]
    missing = FetchRecipe(f"{site.url}/nothing.json", tmp_path / "nothing.json")
    assert "no such file (404)" in refused(missing).message


class TestBreaks:
    def test_a_server_that_closes_in_the_middle_is_taken_up_there(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.cuts[NAME] = [1000, 50_000]
        assert fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM
        etag = seen(site).etag
        assert [(a.range, a.if_range) for a in site.gets(NAME)] == [
            (None, None),
            ("bytes=1000-", etag),
            ("bytes=51000-", etag),
        ]

    def test_a_server_without_ranges_sends_it_again_and_the_front_is_left_out(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.no_ranges, site.cuts[NAME] = True, [1000, 150_000]
        assert fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM
        assert len(site.gets(NAME)) == 3

    def test_another_part_than_was_asked_for(self, site: Site, tmp_path: Path) -> None:
        site.cuts[NAME], site.shift = [1000], 1
        error = refused(of(site, tmp_path, seen(site)))
        assert "asked for bytes from 1000, sent 'bytes 1001-299999/300000'" in error.message

    def test_a_part_that_is_too_long_is_not_used(self, site: Site, tmp_path: Path) -> None:
        site.cuts[NAME] = [70_000] + [0] * QUICK.attempts
        refused(of(site, tmp_path, seen(site)))
        site.cuts.clear()
        with open(tmp_path / "corpus/.fetch/00.jsonl.zst.part", "ab") as part:
            part.write(BODY)
        assert (
            fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM
            and (tmp_path / "corpus/00.jsonl.zst").read_bytes() == BODY
        )

    def test_progress_is_worth_new_patience(self, site: Site, tmp_path: Path) -> None:
        site.cuts[NAME] = [10_000] * (3 * QUICK.attempts)
        assert fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM

    def test_a_dead_server_is_given_up_and_what_came_is_kept(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.cuts[NAME] = [70_000] + [0] * QUICK.attempts
        error = refused(of(site, tmp_path, seen(site)))
        assert (
            f"{site.url}{NAME}" in error.message
            and f"attempt {QUICK.attempts} in a row" in error.message
            and "goes on from there" in error.hint
        )
        assert (tmp_path / "corpus/.fetch/00.jsonl.zst.part").read_bytes() == BODY[:70_000]
        site.asked.clear()
        site.cuts.clear()
        assert fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM
        assert [a.range for a in site.gets(NAME)] == ["bytes=70000-"]

    def test_nobody_there(self, tmp_path: Path) -> None:
        with serve({}) as gone:
            pass
        error = refused(of(gone, tmp_path, RemoteFileInfo(5)))
        assert gone.url in error.message and "Connect" in error.message

    def test_a_killed_fetch_goes_on(self, site: Site, tmp_path: Path) -> None:
        """A real unit process, killed between two blocks."""
        site.cuts[NAME] = [200_000]
        asked = of(site, tmp_path, seen(site))
        spec = tmp_path / "spec.json"
        spec.write_text(json.dumps({"do": "fetch", "recipe": asked.to_json()}))
        process = forkserver.Popen(
            [sys.executable, "-m", "trainkit.data.fetch.worker", str(spec)], stdout=subprocess.PIPE
        )
        part = tmp_path / "corpus/.fetch/00.jsonl.zst.part"
        wait_for(lambda: site.gets(NAME), "the first request")
        wait_for(lambda: part.exists() and part.stat().st_size, "some of it to be there")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not asked.path.exists()
        came = part.stat().st_size
        assert 0 < came <= 200_000
        site.asked.clear()
        assert work({"do": "fetch", "recipe": asked.to_json()}, quiet)["sha256"] == SUM
        assert [a.range for a in site.gets(NAME)] == [f"bytes={came}-"]


class TestRefusals:
    @pytest.mark.parametrize("code", [429, 503])
    def test_a_server_that_wants_a_pause_gets_it(
        self, code: int, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site.answers[NAME] = [(code, {"Retry_After": "3"})]
        held: list[float] = []
        monkeypatch.setattr(ServerGate, "hold", lambda gate, seconds: held.append(seconds))
        assert fetch(of(site, tmp_path, seen(site)), quiet, QUICK).sha256 == SUM
        assert held == [3.0] and len(site.gets(NAME)) == 2

    def test_a_gate_lets_nobody_through_before_its_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By an injected clock: what is waited for is what is left, until nothing is."""
        now, waited = 100.0, list[float]()
        gate = ServerGate()
        monkeypatch.setattr("trainkit.data.fetch.retry.time.monotonic", lambda: now)

        def wait(seconds: float) -> bool:
            nonlocal now
            waited.append(seconds)
            now += seconds / 2 if len(waited) == 1 else seconds  # woken early
            return False

        monkeypatch.setattr(gate, "_closed", SimpleNamespace(wait=wait, is_set=lambda: False))
        gate.hold(4.0)
        gate.hold(1.0)
        gate.wait()
        assert waited == [4.0, 2.0] and now == 104.0

    def test_a_date_to_come_back_is_understood_and_too_late_a_one_is_said(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.answers[NAME] = [(429, {"Retry_After": "Fri, 31 Dec 2100 23:59:59 GMT"})]
        error = refused(of(site, tmp_path, seen(site)))
        assert (
            "429" in error.message
            and "wants to be asked again in" in error.message
            and len(site.gets(NAME)) == 1
        )

    def test_429_for_ever_is_an_error_and_no_missing_file(self, site: Site, tmp_path: Path) -> None:
        site.answers[NAME] = [(429, {})] * 100
        assert "429 Too Many Requests" in refused(of(site, tmp_path, seen(site))).message
        assert len(site.gets(NAME)) == QUICK.attempts

    @pytest.mark.parametrize("kind", ["type", "content"])
    def test_a_page_is_not_the_file(self, kind: str, site: Site, tmp_path: Path) -> None:
        page = (
            b"please log in" if kind == "type" else b"\n<!DOCTYPE html><html>please log in</html>"
        )
        site.files[NAME] = page
        if kind == "type":
            site.types[NAME] = "text/html; charset=utf-8"
        error = refused(of(site, tmp_path, RemoteFileInfo(len(page))))
        assert "a web page instead of the file" in error.message and "browser" in error.hint

    def test_a_page_where_it_was_redirected_to(self, site: Site, tmp_path: Path) -> None:
        site.redirects[NAME] = "/login"
        site.files["/login"], site.types["/login"] = b"<html>", "text/html"
        assert "a web page" in refused(of(site, tmp_path)).message

    def test_another_sum(self, site: Site, tmp_path: Path) -> None:
        error = refused(of(site, tmp_path, RemoteFileInfo(len(BODY), sha256="0" * 64)))
        assert SUM in error.message and "0" * 64 in error.message and left(tmp_path) == set()

    @pytest.mark.parametrize("claim", [-1000, 1000])
    def test_another_length_than_it_says(self, claim: int, site: Site, tmp_path: Path) -> None:
        """A short body ends as a connection that always breaks there; one longer than listed is
        another file."""
        site.claims[NAME] = len(BODY) + claim
        site.no_ranges = True
        error = refused(
            of(site, tmp_path, RemoteFileInfo(len(BODY) + claim))
            if claim > 0
            else of(site, tmp_path, seen(site))
        )
        assert ("no longer the file" in error.message) == (claim < 0)
        assert (
            "RemoteProtocolError"
            if claim > 0
            else f"{len(BODY) - 1000:,} bytes instead of {len(BODY):,}"
        ) in error.message

    @pytest.mark.parametrize("same", [True, False])
    def test_a_server_that_contradicts_itself(
        self, same: bool, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HEAD names one length for ever and GET sends another: to list it anew would not help."""
        listed = RemoteFileInfo(len(BODY) - 1000)
        monkeypatch.setattr(
            "trainkit.data.fetch.http.HttpFile.look",
            lambda self: listed if same else RemoteFileInfo(len(BODY)),
        )
        error = refused(of(site, tmp_path, listed))
        words = f"{len(BODY):,} bytes instead of {len(BODY) - 1000:,}"
        assert (
            words in error.message
            and ("contradicts itself" in error.message) == same
            and ("lists the dataset again" in error.hint) != same
        )
        assert left(tmp_path) == set()

    def test_no_length_at_all(self, site: Site, tmp_path: Path) -> None:
        site.no_length = True
        assert "does not say how long" in refused(of(site, tmp_path)).message

    @pytest.mark.parametrize("change", ["size", "etag", "gone"])
    def test_changed_since_it_was_listed(self, change: str, site: Site, tmp_path: Path) -> None:
        listing = tmp_path / "listing.json"
        listing.write_text("{}")
        before = seen(site)
        if change == "gone":
            del site.files[NAME]
        else:
            site.files[NAME] = BODY[:-1] if change == "size" else BODY[::-1]
        error = refused(of(site, tmp_path, before, listing=listing))
        words = {
            "size": "299,999 bytes instead of 300,000",
            "etag": f"instead of {before.etag}",
            "gone": "no file any more",
        }[change]
        assert "no longer the file that was listed" in error.message and words in error.message
        assert not listing.exists() and "lists the dataset again" in error.hint

    def test_changed_between_two_halves(self, site: Site, tmp_path: Path) -> None:
        """Never half of one and half of the other: neither within a call nor across two."""
        other = BODY[::-1]
        site.cuts[NAME] = [100_000] + [0] * 100
        refused(of(site, tmp_path, seen(site)))
        site.cuts.clear()
        site.files[NAME] = other
        assert "no longer" in refused(of(site, tmp_path, seen(site))).message
        now = RemoteFileInfo(len(other), f'"{hashlib.md5(other).hexdigest()}"')
        site.asked.clear()
        assert (
            fetch(of(site, tmp_path, now), quiet, QUICK).sha256 == hashlib.sha256(other).hexdigest()
        )
        assert (tmp_path / "corpus/00.jsonl.zst").read_bytes() == other
        assert [a.range for a in site.gets(NAME)] == [None]

    def test_mirrors_with_their_own_etags_are_one_file_if_the_date_is(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.dates[NAME], site.etags[NAME] = DATE, '"of-another-mirror"'
        assert (
            fetch(
                of(site, tmp_path, RemoteFileInfo(len(BODY), '"mine"', DATE)), quiet, QUICK
            ).sha256
            == SUM
        )
        shutil.rmtree(tmp_path / "corpus")
        assert (
            "last changed"
            in refused(
                of(
                    site,
                    tmp_path,
                    RemoteFileInfo(len(BODY), '"of-another-mirror"', DATE.replace("07", "08")),
                )
            ).message
        )

    def test_without_anything_to_tell_versions_apart_a_part_is_not_trusted(
        self, site: Site, tmp_path: Path
    ) -> None:
        site.etags[NAME] = None
        site.cuts[NAME] = [100_000] + [0] * QUICK.attempts
        refused(of(site, tmp_path, RemoteFileInfo(len(BODY))))
        site.cuts.clear()
        site.asked.clear()
        assert fetch(of(site, tmp_path, RemoteFileInfo(len(BODY))), quiet, QUICK).sha256 == SUM
        assert [a.range for a in site.gets(NAME)] == [None]


class TestHere:
    def test_two_workers_fetch_it_once(self, site: Site, tmp_path: Path) -> None:
        asked = of(site, tmp_path, seen(site))
        results: list[FetchResult] = []
        threads = [
            threading.Thread(target=lambda: results.append(fetch(asked, quiet, QUICK)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [FetchResult(len(BODY), SUM)] * 4 and len(site.gets(NAME)) == 1

    @pytest.mark.parametrize("known", ["size", "sum"])
    def test_a_file_that_was_copied_there_is_taken_over(
        self, known: str, site: Site, tmp_path: Path
    ) -> None:
        asked = of(
            site, tmp_path, RemoteFileInfo(len(BODY), '"x"', sha256=SUM if known == "sum" else None)
        )
        asked.path.parent.mkdir()
        asked.path.write_bytes(BODY)
        assert fetch(asked, quiet, QUICK).sha256 == SUM and site.asked == []

    @pytest.mark.parametrize("damage", [BODY[:-1], BODY[::-1]])
    def test_one_that_is_not_the_file_is_replaced(
        self, damage: bytes, site: Site, tmp_path: Path
    ) -> None:
        asked = of(site, tmp_path, RemoteFileInfo(len(BODY), seen(site).etag, sha256=SUM))
        fetch(asked, quiet, QUICK)
        asked.path.write_bytes(damage)
        assert (
            fetch(asked, quiet, QUICK).sha256 == SUM
            and asked.path.read_bytes() == BODY
            and len(site.gets(NAME)) == 2
        )

    def test_another_version_on_the_server_replaces_it(self, site: Site, tmp_path: Path) -> None:
        fetch(of(site, tmp_path, seen(site)), quiet, QUICK)
        site.files[NAME] = other = BODY[::-1]
        fetch(
            of(site, tmp_path, RemoteFileInfo(len(other), f'"{hashlib.md5(other).hexdigest()}"')),
            quiet,
            QUICK,
        )
        assert (tmp_path / "corpus/00.jsonl.zst").read_bytes() == other

    def test_somebody_s_own_file_is_never_replaced_unlisted(
        self, site: Site, tmp_path: Path
    ) -> None:
        """A tokenizer's file that was put there; one that we fetched from another address is."""
        asked = of(site, tmp_path)
        asked.path.parent.mkdir()
        asked.path.write_bytes(b"mine")
        assert fetch(asked, quiet, QUICK).bytes == 4 and site.asked == []
        asked.path.unlink()
        fetch(asked, quiet, QUICK)
        site.files["/other"] = b"other"
        fetch(FetchRecipe(f"{site.url}/other", asked.path), quiet, QUICK)
        assert asked.path.read_bytes() == b"other"

    def test_an_empty_file(self, site: Site, tmp_path: Path) -> None:
        site.files[NAME] = b""
        assert (
            fetch(of(site, tmp_path), quiet, QUICK).bytes == 0
            and of(site, tmp_path).path.read_bytes() == b""
        )

    def test_too_little_room_is_said_before_it_begins(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "trainkit.data.fetch.worker.shutil.disk_usage", lambda path: SimpleNamespace(free=1000)
        )
        error = refused(of(site, tmp_path, seen(site)))
        assert (
            "300,000 bytes are still to come, 1,000 are free" in error.message
            and "clusters.X.root" in error.hint
            and site.asked == []
        )

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
    def test_the_disk_refuses(
        self, code: int, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no(handle: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("trainkit.data.fetch.worker.os.fsync", no)
        error = refused(of(site, tmp_path, seen(site)))
        assert os.strerror(code) in error.message and str(tmp_path) in error.message and error.hint

    def test_what_is_there_is_read_where_nothing_can_be_written(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker with the corpus mounted read-only: no lock is taken, no stamp written."""
        asked = of(site, tmp_path, seen(site))
        fetch(asked, quiet, QUICK)
        monkeypatch.setattr("trainkit.data.fetch.worker.locked", None)
        monkeypatch.setattr("trainkit.data.fetch.worker.write_json", None)
        with open_stream(asked, QUICK) as file:
            assert file.read() == BODY

    def test_a_file_where_the_folder_should_be(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "corpus").write_text("")
        with pytest.raises(TrainkitError, match="Not a directory"):
            fetch(of(site, tmp_path, seen(site)), quiet, QUICK)


def test_a_store_without_its_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*words: Any, **options: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(
        TrainkitError, match=r"s3:// cannot be read here: Install s3fs to access S3"
    ) as error:
        file_system("s3", None, True, QUICK)
    assert (
        error.value.exit == 6
        and "-m pip install -e" in str(error.value)
        and "[data]" in str(error.value)
    )
