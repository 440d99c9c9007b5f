"""Reading and writing .bin/.idx: equal to Megatron's bytes, and strict about everything else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.shared import MISSING, golden
from trainkit.base.errors import ConfigError, Exit
from trainkit.data import indexed
from trainkit.data.indexed import HEADER, MAGIC, IndexedDataset, IndexedWriter, best_dtype, merge

GOLDEN = golden()
needs_golden = pytest.mark.skipif(GOLDEN is None, reason=MISSING)
NAMES = ("tok_u16", "tok_i32", "tok_multi_u16")


def _prefix(name: str) -> Path:
    assert GOLDEN is not None
    return GOLDEN / name


def _truth(name: str) -> dict[str, Any]:
    cases = json.loads(_prefix("manifest.json").read_text())["cases"]
    return next(dict(c) for c in cases if c.get("name") == name and c["kind"] == "indexed_dataset")


def _bytes(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_name(prefix.name + ".bin").read_bytes(), prefix.with_name(prefix.name + ".idx").read_bytes()


def _write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return prefix


@needs_golden
@pytest.mark.parametrize("name", [*NAMES, "tok_modal_i32"])
def test_reads_what_megatron_wrote(name: str) -> None:
    dataset, truth = IndexedDataset(_prefix(name)), _truth(name)
    lengths = [n for document in truth["doc_seq_lengths"] for n in document]
    assert dataset.dtype.name == truth["dtype"]
    assert dataset.lengths.tolist() == lengths
    assert np.diff(dataset.document_indices).tolist() == [len(d) for d in truth["doc_seq_lengths"]]
    assert dataset.num_tokens == sum(lengths)
    assert np.array_equal(np.concatenate([dataset[i] for i in range(len(dataset))]), dataset.tokens)
    assert dataset.tokens.tobytes() == _bytes(_prefix(name))[0]
    assert (dataset.modes is None) == ("modes" not in truth)
    if dataset.modes is not None:
        assert dataset.modes.tolist() == np.concatenate([np.ravel(m) for m in truth["modes"]]).tolist()


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_writes_megatrons_bytes(name: str, tmp_path: Path) -> None:
    source, truth = IndexedDataset(_prefix(name)), _truth(name)
    position = 0
    with IndexedWriter(tmp_path / name, source.dtype) as writer:
        for lengths in truth["doc_seq_lengths"]:
            writer.add_document(source.tokens[position : position + sum(lengths)], lengths)
            position += sum(lengths)
    assert _bytes(tmp_path / name) == _bytes(_prefix(name))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


@needs_golden
def test_merges_as_megatron(tmp_path: Path) -> None:
    merge([_prefix("tok_u16"), _prefix("tok_multi_u16")], tmp_path / "merged")
    assert _bytes(tmp_path / "merged") == _bytes(_prefix("tok_merged_u16"))


@needs_golden
def test_empty_documents_are_written_as_megatrons_preprocess_data_does(tmp_path: Path) -> None:
    source = IndexedDataset(_prefix("pre_eod1_text_document"))
    per_document = np.diff(source.document_indices)
    lengths = np.zeros(len(per_document), np.int64)
    lengths[per_document == 1] = source.lengths
    with IndexedWriter(tmp_path / "x", source.dtype) as writer:
        writer.add_documents(source.tokens, lengths)
    assert _bytes(tmp_path / "x") == _bytes(_prefix("pre_eod1_text_document"))


def test_dtype_rule_is_megatrons() -> None:
    assert [best_dtype(n).name for n in (257, 65499, 65500, 65536, 200000)] == ["uint16", "uint16", "int32", "int32", "int32"]


@given(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=8), st.integers(0, 8), st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path: Path, documents: list[list[int]], cut: int, chunk: int) -> None:
    """One by one, all at once and merged from two halves give the same bytes, and reading gives the documents back, in small chunks too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "CHUNK", chunk)
        patch.setattr(os, "fsync", lambda _: None)  # hundreds of files that need not outlive a power cut
        one = _write(tmp_path / "one", documents)
        with IndexedWriter(tmp_path / "flat", "uint16") as writer:
            writer.add_documents(np.array([t for d in documents for t in d], np.uint16), [len(d) for d in documents])
        _write(tmp_path / "a", documents[:cut])
        _write(tmp_path / "b", documents[cut:])
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
        assert _bytes(one) == _bytes(tmp_path / "flat") == _bytes(tmp_path / "merged")
        dataset = IndexedDataset(one)
    bounds = dataset.document_indices
    assert [[t for s in range(bounds[i], bounds[i + 1]) for t in dataset[s].tolist()] for i in range(len(bounds) - 1)] == documents
    assert [dataset[s].tolist() for s in range(len(dataset))] == [d for d in documents if d]


def test_views_copy_nothing_and_cannot_be_written(tmp_path: Path) -> None:
    dataset = IndexedDataset(_write(tmp_path / "x", [[1, 2], [3]]))
    assert np.shares_memory(dataset[1], dataset.tokens)
    assert not dataset.tokens.flags.writeable
    for wrong in (2, -1):
        with pytest.raises(IndexError, match="of 2"):
            dataset[wrong]


def _pair(sequences: int, entries: int, lengths: list[int], offsets: list[int], documents: list[int], *, version: int = 1, code: int = 8) -> bytes:
    header = HEADER.pack(MAGIC, version, code, sequences, entries)
    return header + np.array(lengths, "<i4").tobytes() + np.array(offsets, "<i8").tobytes() + np.array(documents, "<i8").tobytes()


GOOD = _pair(2, 3, [2, 1], [0, 4], [0, 1, 2])
CORRUPTIONS = {
    "empty": (b"", "begins with b''"),
    "magic": (b"PK\x03\x04" + GOOD[4:], "begins with b'PK"),
    "older": (b"TNTIDX\0\0" + GOOD[8:], "older 'lazy'"),
    "short header": (GOOD[:20], "ends after 20 bytes, inside its header of 34"),
    "version": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], version=2), "version 2, not 1"),
    "dtype": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], code=99), "dtype code 99"),
    "float": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 2], code=7), "dtype code 7"),
    "truncated": (GOOD[:-1], "has 81 bytes, but 2 sequences and 3 document entries .* take 82"),
    "too long": (GOOD + b"123", "has 85 bytes"),
    "huge count": (_pair(2**63, 2**64 - 1, [2, 1], [0, 4], [0, 1, 2]), "9,223,372,036,854,775,808 sequences"),
    "no documents": (_pair(0, 0, [], [], []), "at least 1"),
    "negative": (_pair(2, 3, [2, -1], [0, 4], [0, 1, 2]), "sequence 1 has length -1"),
    "offset": (_pair(2, 3, [2, 1], [0, 6], [0, 1, 2]), "sequence 1 begins at byte 6, but the lengths before it sum to byte 4"),
    "first offset": (_pair(2, 3, [2, 1], [2, 4], [0, 1, 2]), "sequence 0 begins at byte 2"),
    "document start": (_pair(2, 3, [2, 1], [0, 4], [1, 1, 2]), "goes from 1 to 2, not from 0 to 2"),
    "document end": (_pair(2, 3, [2, 1], [0, 4], [0, 1, 1]), "goes from 0 to 1"),
    "document order": (_pair(2, 4, [2, 1], [0, 4], [0, 2, 1, 2]), "document 1 ends before it begins"),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_wrong_index_is_refused_with_words(case: str, tmp_path: Path) -> None:
    content, words = CORRUPTIONS[case]
    (tmp_path / "x.idx").write_bytes(content)
    (tmp_path / "x.bin").write_bytes(bytes(6))
    with pytest.raises(ConfigError, match=words) as caught:
        IndexedDataset(tmp_path / "x")
    assert caught.value.exit == Exit.STAGE_FAILED
    assert "x.idx" in str(caught.value)
    assert caught.value.problems()[0]["hint"]


@pytest.mark.parametrize("size", [0, 4, 5, 7, 8])
def test_a_bin_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(GOOD)
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=rf"x\.bin: has {size} bytes, but x\.idx describes 6"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("missing", ["x.idx", "x.bin"])
def test_a_missing_half_is_named(missing: str, tmp_path: Path) -> None:
    _write(tmp_path / "x", [[1]])
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing}: No such file"):
        IndexedDataset(tmp_path / "x")


def test_no_tokens_at_all(tmp_path: Path) -> None:
    for documents in (0, 2):
        dataset = IndexedDataset(_write(tmp_path / str(documents), [[] for _ in range(documents)]))
        assert (len(dataset), dataset.num_tokens) == (0, 0)
        assert dataset.document_indices.tolist() == [0] * (documents + 1)


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_only_config_errors(tmp_path: Path, data: st.DataObject) -> None:
    """Random bytes, or a good file with bytes changed, cut or added: read, or refused with ConfigError; never anything else."""
    content = bytearray(data.draw(st.one_of(st.just(GOOD), st.binary(max_size=90), st.binary(max_size=60).map(lambda b: MAGIC + b))))
    for position, value in data.draw(st.lists(st.tuples(st.integers(0, 81), st.integers(0, 255)), max_size=4)):
        content[position : position + 1] = bytes([value])
    (tmp_path / "x.idx").write_bytes(content[: data.draw(st.integers(0, 100))])
    (tmp_path / "x.bin").write_bytes(bytes(data.draw(st.sampled_from([0, 3, 6, 12]))))
    try:
        dataset = IndexedDataset(tmp_path / "x")
    except ConfigError:
        return
    assert sum(len(dataset[s]) for s in range(len(dataset))) == dataset.num_tokens


@pytest.mark.parametrize(
    ("tokens", "lengths", "error", "words"),
    [
        (np.array([1, 70000]), None, ConfigError, "the id 70000 does not fit uint16"),
        (np.array([1, -1], np.int16), None, ConfigError, "the id -1 does not fit uint16"),
        (np.array([1.0]), None, TypeError, "not of an integer"),
        (np.array([1, 2]), [1], ValueError, "lengths sum to 1"),
        (np.array([1, 2]), [3, -1], ConfigError, "-1 tokens"),
        (np.array([[1, 2]]), [2], ValueError, "shape"),
        (np.array([1]), [2**31], ConfigError, "2,147,483,648 tokens does not fit .idx"),
    ],
)
def test_wrong_documents_are_refused_and_leave_nothing(
    tokens: NDArray[Any], lengths: list[int] | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(tokens, lengths)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float32"):
        IndexedWriter(tmp_path / "x", "float32")


def test_merge_refuses_mixed_dtypes_and_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "a", [[1]])
    _write(tmp_path / "b", [[1]], "int32")
    with pytest.raises(ConfigError, match=r"b\.idx: holds int32, but m is of uint16"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge([], tmp_path / "m")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("m")]


def test_a_failed_write_leaves_the_former_pair(tmp_path: Path) -> None:
    before = _bytes(_write(tmp_path / "x", [[1, 2, 3]]))
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(np.array([9]))
        raise RuntimeError("stop")
    assert _bytes(tmp_path / "x") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


KILLED_AT_A_STEP = """
import os, signal, sys
import numpy as np
from pathlib import Path
from trainkit.data import indexed

step = int(sys.argv[2])
def die_at(function):
    def wrapped(*args, **keys):
        global step
        if step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step -= 1
        return function(*args, **keys)
    return wrapped

for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
    setattr(owner, name, die_at(getattr(owner, name)))
with indexed.IndexedWriter(Path(sys.argv[1]), "uint16") as writer:
    writer.add_document(np.array([7, 8, 9, 10]))
"""


def test_sigkill_never_pairs_an_old_index_with_new_tokens(tmp_path: Path) -> None:
    """Kill a writer before each of its steps on disk: what is left is the old pair, the new pair, or no .idx."""
    seen = set()
    root = Path(__file__).resolve().parents[2]
    for step in range(12):
        prefix = _write(tmp_path / "x", [[1, 2, 3]])
        old = _bytes(prefix)
        argv = [sys.executable, "-c", KILLED_AT_A_STEP, str(prefix), str(step)]
        child = subprocess.run(argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        if (tmp_path / "x.idx").exists():
            IndexedDataset(prefix)
            seen.add("old" if _bytes(prefix) == old else "new")
        else:
            seen.add("none")
    assert child.returncode == 0, "the writer has more steps than the test kills"
    assert seen == {"old", "none", "new"}
