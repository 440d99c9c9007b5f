"""s3:// over a real socket: moto's S3 server of this machine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.fetch_server import QUICK, fetched
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.data.fetch import object_store as fetch_fsspec
from trainkit.data.fetch.object_store import StoredFile
from trainkit.data.fetch.worker import fetch, open_stream, work
from trainkit.data.sources import SOURCES, Shard, fetch_units, fetched_prefixes
from trainkit.jobs.schema import Dataset, Tokenizer

pytest.importorskip("moto.server", reason="the S3 server of these tests")
pytest.importorskip("s3fs", reason="the extra `data`")
BODY = bytes(range(256)) * 1000
BUCKET = "published"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = importlib.import_module("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket with three objects that all may read, as an S3 client sees it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key-of-ours")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    boto3 = importlib.import_module("boto3")
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for i in range(3):
        client.put_object(
            Bucket=BUCKET, Key=f"data/0{i}.jsonl.zst", Body=BODY + bytes([i]), ACL="public-read"
        )
    yield client
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    client.delete_bucket(Bucket=BUCKET)


def stored(endpoint: str | None, *urls: str, **words: Any) -> Dataset:
    return Dataset(
        **{
            "name": "d",
            "source": "web",
            "urls": urls,
            "endpoint": endpoint or None,
            "tokenizer": Tokenizer(name="t", vocab_size=300),
            **words,
        }
    )


def run(dataset: Dataset, corpus: Path) -> list[Shard]:
    shards = SOURCES[dataset.source].shards(dataset, corpus)
    for unit in fetch_units(dataset, corpus, shards):
        work(dict(unit.spec), lambda done, total: None)
    return shards


@pytest.mark.parametrize(
    "urls", [("s3://published/data/{00..02}.jsonl.zst",), ("s3://published/data/*.jsonl.zst",)]
)
@pytest.mark.parametrize("anonymous", [False, True])
def test_objects_come_whole_in_blocks(
    urls: tuple[str, ...],
    anonymous: bool,
    bucket: Any,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch_fsspec, "BLOCK", 100_000)
    if anonymous:
        bucket.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    shards = run(stored(endpoint, *urls, anonymous=anonymous, files=3), tmp_path)
    assert [s.path for s in shards] == [tmp_path / f"0{i}.jsonl.zst" for i in range(3)]
    assert all(
        s.path.read_bytes() == BODY + bytes([i]) and s.size == len(BODY) + 1
        for i, s in enumerate(shards)
    )
    assert all(
        b"a-secret-key-of-ours" not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    )


def test_a_missing_object_and_a_missing_bucket_are_named(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    bucket.delete_object(Bucket=BUCKET, Key="data/01.jsonl.zst")
    with pytest.raises(
        ConfigError, match=r"1 of 3 files are not there: s3://published/data/01\.jsonl\.zst"
    ):
        run(stored(endpoint, "s3://published/data/{00..02}.jsonl.zst"), tmp_path)
    with pytest.raises(ConfigError, match=r"not there: s3://nothing/x\.jsonl"):
        run(stored(endpoint, "s3://nothing/x.jsonl"), tmp_path)
    with pytest.raises(ConfigError, match=r"not there: s3://published/none/\*"):
        run(stored(endpoint, "s3://published/none/*.jsonl"), tmp_path)


def test_no_credentials(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(TrainkitError, match="credentials") as error:
        run(stored(endpoint, "s3://published/data/00.jsonl.zst"), tmp_path)
    assert error.value.exit == 6 and "anonymous = true" in error.value.hint


def test_a_half_is_taken_up_and_a_changed_object_is_not(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_fsspec, "BLOCK", 100_000)
    dataset = stored(endpoint, "s3://published/data/00.jsonl.zst")
    (shard,) = SOURCES["web"].shards(dataset, tmp_path)
    starts: list[int] = []

    def breaks(files: Any, asked: dict[str, Any], after: int) -> Any:
        original = files.cat_file

        def cat_file(url: str, start: int, end: int) -> bytes:
            if len(starts) >= after:
                raise KeyboardInterrupt
            starts.append(start)
            return bytes(original(url, start=start, end=end))

        files.cat_file = cat_file
        return files

    original = fetch_fsspec.file_system
    with monkeypatch.context() as patched:
        patched.setattr(
            "trainkit.data.fetch.worker.file_system", lambda *words: breaks(original(*words), {}, 2)
        )
        with pytest.raises(KeyboardInterrupt):
            fetch(fetched(shard), lambda done, total: None, QUICK)
    assert (
        starts == [0, 100_000] and (tmp_path / ".fetch/00.jsonl.zst.part").stat().st_size == 200_000
    )
    starts.clear()
    with monkeypatch.context() as patched:
        patched.setattr(
            "trainkit.data.fetch.worker.file_system",
            lambda *words: breaks(original(*words), {}, 99),
        )
        fetch(fetched(shard), lambda done, total: None, QUICK)
    assert starts == [200_000] and shard.path.read_bytes() == BODY + b"\0"
    shard.path.unlink()
    bucket.put_object(Bucket=BUCKET, Key="data/00.jsonl.zst", Body=BODY + b"\7")
    with pytest.raises(TrainkitError, match="no longer the file that was listed"):
        fetch(fetched(shard), lambda done, total: None, QUICK)


def test_a_stream(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    (shard,) = SOURCES["web"].shards(
        stored(endpoint, "s3://published/data/02.jsonl.zst", keep_download=False), tmp_path
    )
    with open_stream(fetched(shard), QUICK) as file:
        assert file.read() == BODY + b"\2"
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_changes_while_it_is_read(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are requests of their own, so the version is looked at again behind the last."""
    monkeypatch.setattr(fetch_fsspec, "BLOCK", 100_000)
    (shard,) = SOURCES["web"].shards(stored(endpoint, "s3://published/data/01.jsonl.zst"), tmp_path)
    original = StoredFile.look
    looks: list[int] = []

    def look(self: StoredFile) -> Any:
        if looks:
            bucket.put_object(Bucket=BUCKET, Key="data/01.jsonl.zst", Body=BODY[::-1] + b"\1")
        looks.append(1)
        return original(self)

    monkeypatch.setattr(StoredFile, "look", look)
    with pytest.raises(TrainkitError, match="no longer the file that was listed"):
        fetch(fetched(shard), lambda done, total: None, QUICK)
    assert not shard.path.exists()


def test_ready_made_pairs(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        bucket.put_object(Bucket=BUCKET, Key=f"wiki/my-gpt2_text_document.{end}", Body=end.encode())
    dataset = stored(
        endpoint,
        "s3://published/wiki/my-gpt2_text_document.idx",
        "s3://published/wiki/my-gpt2_text_document.bin",
        source="indexed",
    )
    run(dataset, tmp_path)
    (prefix,) = fetched_prefixes(dataset, tmp_path)
    assert (
        prefix.with_suffix(".bin").read_bytes() == b"bin"
        and prefix.with_suffix(".idx").read_bytes() == b"idx"
    )


@pytest.mark.parametrize(
    ("url", "words", "message"),
    [
        ("nosuch://b/x.jsonl", {}, "nosuch:// cannot be read here"),
        ("memory://b/x.jsonl", {"endpoint": "http://h"}, "means nothing to memory://"),
        ("memory://b/x.jsonl", {"anonymous": True}, "anonymous = true means nothing to memory://"),
        ("s3://b/x.jsonl", {"token": "HF_TOKEN"}, "is for https:// and hf://"),
    ],
)
def test_keys_that_a_store_does_not_know(
    url: str, words: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainkitError, match=message):
        run(stored(words.pop("endpoint", None), url, **words), tmp_path)


def test_any_scheme_of_fsspec(tmp_path: Path) -> None:
    fsspec = importlib.import_module("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe_file("/corpus/a.jsonl", b'{"text": "a"}\n')
    try:
        (shard,) = run(stored(None, "memory://corpus/a.jsonl"), tmp_path)
        assert shard.path.read_bytes() == b'{"text": "a"}\n'
    finally:
        files.rm("/corpus", recursive=True)
