"""One shard from text to .bin/.idx: counts, several sequences, filters, bad lines, restarts,
memory, threads."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests import forkserver
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.tokenize import encoders as encode, shard_worker as shard
from trainkit.data.tokenize.shard_worker import read_ahead, write_behind
from trainkit.data.tokenizer import load_tokenizer, train_bpe

EOD = "<|endoftext|>"
Spec = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter([Path(__file__).read_text()]), 400, EOD).save(str(path))
    return path


def spec_of(
    folder: Path, tokenizer: Path, lines: list[Any], name: str = "x.jsonl", **more: Any
) -> Spec:
    """A spec for documents written as JSON lines; bytes are lines as they are."""
    data = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    path = folder / name
    path.write_bytes(
        zstandard.compress(data)
        if name.endswith(".zst")
        else gzip.compress(data)
        if name.endswith(".gz")
        else data
    )
    spec = {
        "do": "tokens",
        "name": name,
        "shard": str(path),
        "size": path.stat().st_size,
        "tokenizer": str(tokenizer),
        "eod_token": EOD,
    }
    return {
        **spec,
        "prefix": str(folder / "shards" / "00000"),
        "rejects": str(folder / "rejects" / "00000.jsonl"),
        "text_key": "text",
        **more,
    }


def run(spec: Spec) -> dict[str, Any]:
    return shard.ShardWorker()(spec, lambda *done, **counts: None)


def documents_of(spec: Spec) -> list[list[list[int]]]:
    pair = IndexedDataset(Path(spec["prefix"]))
    bounds = pair.document_indices
    return [
        [pair[s].tolist() for s in range(bounds[d], bounds[d + 1])] for d in range(len(bounds) - 1)
    ]


def ids(tokenizer: Path, text: str) -> list[int]:
    return list(load_tokenizer(tokenizer).encode(text).ids)


def encoders() -> list[str]:
    try:
        import gigatoken  # noqa: F401
    except ImportError:
        return ["tokenizers"]
    return ["tokenizers", "gigatoken"]


@pytest.mark.parametrize("encoder", encoders())
def test_documents_sequences_and_counts(encoder: str, tokenizer: Path, tmp_path: Path) -> None:
    lines = [
        {"text": "one"},
        b"",
        {"text": ""},
        {"text": ["two", "", "drei ä"]},
        {"text": []},
        {"text": ["", ""]},
        {"text": f"x{EOD}"},
    ]
    spec = spec_of(tmp_path, tokenizer, lines, encoder=encoder)
    seen: list[tuple[int, int]] = []
    result = shard.ShardWorker()(spec, lambda done, total, **counts: seen.append((done, total)))
    eod = load_tokenizer(tokenizer).token_to_id(EOD)
    one, two, three, last = (ids(tokenizer, text) for text in ("one", "two", "drei ä", f"x{EOD}"))
    assert documents_of(spec) == [[[*one, eod]], [], [two, [*three, eod]], [], [], [[*last, eod]]]
    assert eod not in last
    words = {
        "documents": 6,
        "empty_documents": 3,
        "sequences": 4,
        "tokens": sum(map(len, (one, two, three, last))) + 3,
        "text_bytes": 27,
        "lines": 6,
    }
    assert {key: result[key] for key in words} == words
    assert result["left_out"] == {} == result["rejected"] and result["rejects"] == 0
    assert seen[-1] == (spec["size"], spec["size"])
    import xxhash

    for key, path in (("bin_xxh128", bin_path), ("idx_xxh128", idx_path)):
        assert result[key] == xxhash.xxh128(path(Path(spec["prefix"])).read_bytes()).hexdigest()
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == [
        "00000.bin",
        "00000.idx",
        "00000.lock",
    ]


@pytest.mark.parametrize("encoder", encoders())
@pytest.mark.parametrize("special", ["text", "parse"])
def test_a_literal_special_token_and_no_eod(
    encoder: str, special: str, tokenizer: Path, tmp_path: Path
) -> None:
    spec = spec_of(
        tmp_path,
        tokenizer,
        [{"text": f"a{EOD}b"}],
        encoder=encoder,
        special_tokens=special,
        append_eod=False,
    )
    run(spec)
    eod = load_tokenizer(tokenizer).token_to_id(EOD)
    text = ids(tokenizer, f"a{EOD}b")
    assert documents_of(spec) == [
        [text if special == "text" else [*ids(tokenizer, "a"), eod, *ids(tokenizer, "b")]]
    ]


def test_encoders_batches_and_formats_give_the_same_bytes(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"text": f"document {n} " * (n % 40)} for n in range(500)]
    seen = set()
    for batch in (1, 1000, 2**21):
        monkeypatch.setattr(shard, "BATCH_BYTES", batch)
        for name in ("x.jsonl", "x.jsonl.zst", "x.json.gz"):
            for encoder in encoders():
                spec = spec_of(tmp_path, tokenizer, lines, name, encoder=encoder)
                result = run(spec)
                seen.add(
                    (
                        result["bin_xxh128"],
                        result["idx_xxh128"],
                        result["documents"],
                        result["empty_documents"],
                    )
                )
    assert len(seen) == 1 and next(iter(seen))[2:] == (500, 13)


def test_the_pairs_dtype_is_megatrons(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path, tokenizer, [{"text": "abc"}])
    run(spec)
    assert IndexedDataset(Path(spec["prefix"])).dtype == np.uint16
    monkeypatch.setattr(shard, "best_dtype", lambda size: np.dtype("<i4"))
    run(spec)
    assert IndexedDataset(Path(spec["prefix"])).dtype == np.int32
    monkeypatch.setattr(shard, "best_dtype", lambda size: np.dtype("<i1"))
    with pytest.raises(ConfigError, match="its highest is 399"):
        run(spec)


def test_filters_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    lines = [
        {"text": "keep this", "meta": {"set": "C4"}},
        {"text": "a book", "meta": {"set": "Book"}},
        {"text": "x"},
        {"body": "no"},
    ]
    more: Spec = {
        "drop": {"meta.set": ["Book"]},
        "min_document_bytes": 3,
        "on_error": "skip",
        "max_reject_fraction": 0.3,
    }
    spec = spec_of(tmp_path, tokenizer, lines, **more)
    result = run(spec)
    assert result["documents"] == 1 and result["lines"] == 4
    assert result["left_out"] == {"meta.set = Book": 1, "below 3 bytes": 1}
    assert result["rejected"] == {"no text": 1} and result["rejects"] == 1
    (row,) = (json.loads(line) for line in Path(spec["rejects"]).read_text().splitlines())
    assert (row["line"], row["file"]) == (4, spec["shard"])
    run(spec_of(tmp_path, tokenizer, lines[:3], **more))
    assert not Path(spec["rejects"]).exists()


BAD = b'{"text": "cut'


def test_the_first_bad_line_stops_and_leaves_nothing(tokenizer: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tokenizer, [{"text": "fine " * 1000}] * 300 + [BAD])
    with pytest.raises(
        ConfigError, match=r"x\.jsonl:301: is not JSON: .*\{\"text\": \"cut"
    ) as caught:
        run(spec)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert [p.name for p in (tmp_path / "shards").iterdir()] == ["00000.lock"]
    assert not any(thread.name in ("ahead", "behind") for thread in threading.enumerate())


def test_too_many_bad_lines_stop_early(tokenizer: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tokenizer, [BAD] * 30_000, on_error="skip")
    with pytest.raises(ConfigError, match=r"10,000 of 10,000 lines are bad \(10,000 not JSON\)"):
        run(spec)
    assert not Path(spec["rejects"]).exists()


def test_a_difference_between_the_encoders_stops_and_names_the_document(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    lines = [{"text": "fine"}, b"", {"text": ["fine", "this is WRONG here"]}, {"text": "fine"}]
    right = encode.GigatokenEncoder.encode

    def wrong(self: encode.GigatokenEncoder, texts: Any) -> Any:
        found, lengths = right(self, texts)
        return (
            np.concatenate(
                [
                    part + (b"WRONG" in text)
                    for part, text in zip(
                        np.split(found, np.cumsum(lengths)[:-1]), texts, strict=True
                    )
                ]
            ),
            lengths,
        )

    monkeypatch.setattr(shard, "BATCH_BYTES", 5)
    monkeypatch.setattr(encode.GigatokenEncoder, "encode", wrong)
    with pytest.raises(
        ConfigError, match=r"x\.jsonl:3: gigatoken does not give the ids of tokenizers: id 0 is"
    ) as caught:
        run(spec_of(tmp_path, tokenizer, lines, encoder="gigatoken"))
    assert caught.value.exit == Exit.STAGE_FAILED and "encoder" in str(
        caught.value.problems()[0]["hint"]
    )
    result = run(spec_of(tmp_path, tokenizer, lines, encoder="gigatoken", first=False))
    assert result["compared"] == 0 and result["documents"] == 3


def test_only_a_datasets_first_shard_compares_its_first_documents(
    tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gigatoken")
    lines = [{"text": "text"}] * 300
    assert run(spec_of(tmp_path, tokenizer, lines, encoder="gigatoken"))["compared"] in (200, 201)
    assert (
        run(spec_of(tmp_path, tokenizer, lines, encoder="gigatoken", first=False))["compared"] <= 1
    )


KILLED = """
import os, signal, sys, json, threading, time
from pathlib import Path
from trainkit.data.tokenize import shard_worker as shard
spec = json.loads(Path(sys.argv[1]).read_text())
def kill():
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
shard.ShardWorker()(spec, lambda *a, **k: None)
"""


def test_killed_anywhere_the_next_call_gives_the_same_bytes(
    tokenizer: Path, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, tokenizer, [{"text": f"document {n} " * 40} for n in range(3000)])
    expected = run(spec)["bin_xxh128"]
    idx_path(Path(spec["prefix"])).unlink()
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    root = Path(__file__).resolve().parents[3]
    for seconds in ("0.02", "0.2", "0.5"):
        argv = [sys.executable, "-c", KILLED, str(tmp_path / "spec.json"), seconds]
        child = subprocess.run(
            argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False
        )
        assert child.returncode in (0, -signal.SIGKILL)
        if idx_path(Path(spec["prefix"])).exists():
            IndexedDataset(Path(spec["prefix"]))
    assert run(spec)["bin_xxh128"] == expected


def test_two_at_once_write_one_after_the_other(tokenizer: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tokenizer, [{"text": f"document {n} " * 40} for n in range(500)])
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    root = Path(__file__).resolve().parents[3]
    argv = [
        sys.executable,
        "-m",
        "trainkit.data.tokenize.shard_worker",
        str(tmp_path / "spec.json"),
    ]
    children = [
        forkserver.Popen(
            argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    results = [json.loads(out.splitlines()[-1])["result"] for out in outs]
    assert results[0] == results[1] and len(documents_of(spec)) == 500


MEASURED = """
import json, sys
from pathlib import Path
from trainkit.data.tokenize import shard_worker as shard
shard.ShardWorker()(json.loads(Path(sys.argv[1]).read_text()), lambda *a, **k: None)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_shard(tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    peaks = []
    root = Path(__file__).resolve().parents[3]
    for count, dice in ((2000, random.Random(1)), (8000, random.Random(2))):
        spec = spec_of(
            tmp_path,
            tokenizer,
            [{"text": dice.randbytes(7000).hex(" ", 3)} for _ in range(count)],
            "x.jsonl.zst",
            encoder="gigatoken",
        )
        (tmp_path / "spec.json").write_text(json.dumps({**spec, "first": False}))
        argv = [sys.executable, "-c", MEASURED, str(tmp_path / "spec.json")]
        child = subprocess.run(
            argv,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            check=True,
        )
        peaks.append(int(child.stdout) / 1024)
    assert peaks[1] < peaks[0] + 90, f"MiB: {peaks} for 37 and 149 MB of text"
    assert peaks[1] < 400


def test_add_documents_of_several_sequences(tmp_path: Path) -> None:
    tokens, lengths, counts = np.arange(6), [1, 0, 2, 0, 3], np.array([0, 3, 1, 0, 1])
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_documents(tokens, lengths, counts)
        writer.add_documents(tokens[:2], [1, 1], np.array([2]))
        with pytest.raises(
            ValueError, match="the documents have 3 sequences, but there are 2 lengths"
        ):
            writer.add_documents(tokens[:2], [1, 1], np.array([3]))
    pair = IndexedDataset(tmp_path / "x")
    assert pair.lengths.tolist() == [1, 2, 3, 1, 1] and pair.document_indices.tolist() == [
        0,
        0,
        2,
        2,
        2,
        3,
        5,
    ]


def test_ahead_is_bounded_ordered_and_closed() -> None:
    made: list[int] = []
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            for number in range(100):
                made.append(number)
                yield number
        finally:
            closed.set()

    with read_ahead(source()) as items:
        assert [next(items), next(items)] == [0, 1]
        time.sleep(0.1)
        assert len(made) <= 4
    assert closed.is_set() and len(made) <= 5
    with read_ahead(iter(range(50))) as items:
        assert list(items) == list(range(50))


def test_errors_of_other_threads_are_raised_here() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("source")

    with pytest.raises(RuntimeError, match="source"), read_ahead(broken()) as items:
        assert next(items) == 1
        next(items)

    def sink(item: int) -> None:
        if item == 3:
            raise OSError(28, "no space")

    def write_all(write: Callable[[int], None], count: int) -> None:
        for item in range(count):
            write(item)

    for count in (4, 100):
        with pytest.raises(OSError, match="no space"), write_behind(sink) as write:
            write_all(write, count)
    taken: list[int] = []
    with write_behind(taken.append) as write:
        write_all(write, 50)
    assert taken == list(range(50))


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_damaged_gzip_is_no_bad_line(on_error: str, tokenizer: Path, tmp_path: Path) -> None:
    """A bit flip in a stored block makes a line that is not JSON long before the sum at the end
    of the file is read."""
    spec = spec_of(
        tmp_path,
        tokenizer,
        [{"text": "a plain text"}] * 3,
        "x.jsonl.gz",
        on_error=on_error,
        max_reject_fraction=0.1,
    )
    lines = b"".join(b'{"text": "number %d"}\n' % number for number in range(20_000))
    stored = bytearray(gzip.compress(lines, compresslevel=0))
    stored[stored.index(b'"number 7"')] ^= 1
    Path(spec["shard"]).write_bytes(stored)
    with pytest.raises(
        ConfigError, match=r"x\.jsonl\.gz: is not a gzip file, or a damaged one"
    ) as caught:
        run(spec)
    assert caught.value.exit == Exit.STAGE_FAILED
