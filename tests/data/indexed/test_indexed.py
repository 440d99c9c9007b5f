"""Reading and writing .bin/.idx: equal to Megatron's bytes, and strict about everything else."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from tests.data.pairs import pair_bytes, write_documents
from tests.shared import MISSING, golden
from trainkit.base.errors import ConfigError
from trainkit.data import IndexedDataset
from trainkit.data.indexed import dataset as indexed, format as idx
from trainkit.data.indexed.dataset import IndexedWriter, best_dtype
from trainkit.data.indexed.format import HEADER, MAGIC

GOLDEN = golden()


needs_golden = pytest.mark.skipif(GOLDEN is None, reason=MISSING)


NAMES = ("tok_u16", "tok_i32", "tok_multi_u16")


def _prefix(name: str) -> Path:
    assert GOLDEN is not None
    return GOLDEN / name


def _truth(name: str) -> dict[str, Any]:
    cases = json.loads(_prefix("manifest.json").read_text())["cases"]
    return next(dict(c) for c in cases if c.get("name") == name and c["kind"] == "indexed_dataset")


@needs_golden
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "tok_modal_i32"])
def test_reads_what_megatron_wrote(name: str, mmap: bool) -> None:
    dataset, truth = IndexedDataset(_prefix(name), mmap=mmap), _truth(name)
    dataset.verify()
    lengths = [n for document in truth["doc_seq_lengths"] for n in document]
    assert dataset.dtype.name == truth["dtype"]
    assert dataset.lengths.tolist() == lengths
    assert np.diff(dataset.document_indices).tolist() == [len(d) for d in truth["doc_seq_lengths"]]
    assert dataset.num_tokens == sum(lengths)
    assert np.concatenate(dataset[:]).tobytes() == pair_bytes(_prefix(name))[0]
    assert [[len(sequence) for sequence in document] for document in dataset.documents] == truth[
        "doc_seq_lengths"
    ]
    assert (dataset.modes is None) == ("modes" not in truth)
    if dataset.modes is not None:
        assert (
            dataset.modes.tolist() == np.concatenate([np.ravel(m) for m in truth["modes"]]).tolist()
        )


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_writes_megatrons_bytes(name: str, tmp_path: Path) -> None:
    source, truth = IndexedDataset(_prefix(name)), _truth(name)
    position = 0
    with IndexedWriter(tmp_path / name, source.dtype) as writer:
        for lengths in truth["doc_seq_lengths"]:
            writer.add_document(source.tokens[position : position + sum(lengths)], lengths)
            position += sum(lengths)
    assert pair_bytes(tmp_path / name) == pair_bytes(_prefix(name))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


def test_dtype_rule_is_megatrons() -> None:
    assert [best_dtype(n).name for n in (257, 65499, 65500, 65536, 200000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
        "int32",
    ]


@given(
    st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=8),
    st.integers(1, 3),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_round_trip(tmp_path: Path, documents: list[list[int]], chunk: int) -> None:
    """One by one and all at once give the same bytes, and reading gives
    the documents back, in small chunks too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "CHUNK", chunk)
        patch.setattr(idx, "CHUNK", chunk)
        # hundreds of files that need not outlive a power cut
        patch.setattr(os, "fsync", lambda _: None)
        one = write_documents(tmp_path / "one", documents)
        with IndexedWriter(tmp_path / "flat", "uint16") as writer:
            writer.add_documents(
                np.array([t for d in documents for t in d], np.uint16), [len(d) for d in documents]
            )
        assert pair_bytes(one) == pair_bytes(tmp_path / "flat")
        dataset = IndexedDataset(one)
        dataset.verify()
    for opened in (dataset, IndexedDataset(str(one), mmap=False)):
        assert [
            [t for sequence in document for t in sequence.tolist()] for document in opened.documents
        ] == documents
        assert [sequence.tolist() for sequence in opened[:]] == [d for d in documents if d]


def test_views_copy_nothing_and_cannot_be_written(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2], [3]]))
    assert np.shares_memory(dataset[1], dataset.tokens) and np.shares_memory(
        dataset[::-1][0], dataset.tokens
    )
    assert not dataset.tokens.flags.writeable and not dataset.lengths.flags.writeable


@pytest.mark.parametrize("mmap", [True, False])
def test_is_a_list_of_sequences(mmap: bool, tmp_path: Path) -> None:
    truth = [[1, 2], [3], [4, 5, 6]]
    dataset = IndexedDataset(
        write_documents(tmp_path / "x", [truth[0], [], truth[1], truth[2]]), mmap=mmap
    )
    assert [sequence.tolist() for sequence in dataset] == truth  # type: ignore[attr-defined]
    for wanted in (slice(None), slice(1, None), slice(None, None, -1), slice(-2, 9), slice(2, 0)):
        assert [sequence.tolist() for sequence in dataset[wanted]] == truth[wanted]
    assert dataset[-1].tolist() == truth[-1] == dataset[np.int64(2)].tolist()  # type: ignore[call-overload]
    assert dataset[0].dtype == np.uint16 and not dataset[0].flags.writeable
    assert [[s.tolist() for s in d] for d in dataset.documents] == [
        [truth[0]],
        [],
        [truth[1]],
        [truth[2]],
    ]
    assert (
        [s.tolist() for s in dataset.documents[-1]] == [truth[2]]
        and len(dataset.documents[1:3]) == 2
        and dataset.num_documents == 4
    )
    for read in (
        lambda: dataset[3],
        lambda: dataset[-4],
        lambda: dataset.document(4),
        lambda: dataset.documents[-5],
    ):
        with pytest.raises(IndexError, match=r" of [34] in "):
            read()


@pytest.mark.parametrize("mmap", [True, False])
def test_get_reads_a_part(mmap: bool, tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "x", [[1, 2], [3, 4, 5, 6]]), mmap=mmap)
    assert dataset.get(1).tolist() == [3, 4, 5, 6]
    assert dataset.get(1, 1).tolist() == [4, 5, 6]
    assert dataset.get(-1, offset=1, length=2).tolist() == [4, 5]
    assert dataset.get(1, 4).tolist() == dataset.get(0, 1, 0).tolist() == []
    for offset, length in ((5, None), (0, 5), (3, 2), (-1, 1), (0, -1)):
        with pytest.raises(IndexError, match=r"of sequence 1 of .* which has 4"):
            dataset.get(1, offset, length)


def test_without_maps_nothing_is_mapped(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "unmapped", [[1, 2], [3]]), mmap=False)
    assert (dataset[1].tolist(), dataset.lengths.tolist(), dataset.document_indices.tolist()) == (
        [3],
        [2, 1],
        [0, 1, 2],
    )
    assert "unmapped" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="mmap = False"):
        _ = dataset.tokens


@pytest.mark.parametrize("mmap", [True, False])
def test_files_that_become_shorter_are_an_error(mmap: bool, tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "x", [[1, 2], [3]])
    dataset, other = IndexedDataset(prefix, mmap=mmap), IndexedDataset(prefix, mmap=mmap)
    os.truncate(tmp_path / "x.bin", 4)
    with pytest.raises(
        ConfigError,
        match=r"x\.bin: (had 6 bytes when it was opened and has 4 now|ends before byte 6)",
    ):
        _ = dataset[1]
    os.truncate(tmp_path / "x.idx", 40)
    with pytest.raises(
        ConfigError,
        match=r"x\.idx: (had 82 bytes when it was opened and has 40 now|ends before byte 82)",
    ):
        _ = other.lengths


@pytest.mark.parametrize("mmap", [False, True])
def test_workers_that_are_spawned_open_it_themselves(mmap: bool, tmp_path: Path) -> None:
    """A pickle says where the pair lies and how it is read: it holds no token, and no open file."""
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document(np.arange(50_000, dtype=np.uint16), [20_000, 30_000])
    dataset = IndexedDataset(tmp_path / "pair", mmap=mmap)
    assert dataset[1][0] == 20_000  # the file and the arrays are open
    state = pickle.dumps(dataset)
    assert len(state) < 1000
    again = pickle.loads(state)
    assert (
        again.mmap == mmap
        and again.prefix == dataset.prefix
        and [len(part) for part in again] == [20_000, 30_000]
    )


def test_opening_reads_no_array(tmp_path: Path) -> None:
    """A few hundred bytes, however many sequences there are: the rest of this .idx is a hole
    without a single block on disk."""
    sequences = 2**31
    header = HEADER.pack(MAGIC, 1, 8, sequences, 2)
    with open(tmp_path / "x.idx", "wb") as file:
        file.write(header)
        file.seek(HEADER.size + 12 * sequences + 8)
        file.write(np.array([sequences], "<i8").tobytes())
    (tmp_path / "x.bin").touch()
    dataset = IndexedDataset(tmp_path / "x")
    assert (len(dataset), dataset.num_tokens, len(dataset[-1])) == (sequences, 0, 0)
    assert (tmp_path / "x.idx").stat().st_blocks * 512 < 2**20 < 12 * sequences


def test_needs_numpy_only() -> None:
    code = (
        "import sys; from trainkit.data import IndexedDataset; print(*sorted({n.split('.')[0] for n"
        " in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "numpy" in done.stdout.split()
    assert not {"torch", "pydantic", "tokenizers", "zstandard"} & set(done.stdout.split())


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
    tokens: NDArray[Any],
    lengths: list[int] | None,
    error: type[Exception],
    words: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=words), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(tokens, lengths)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float32"):
        IndexedWriter(tmp_path / "x", "float32")


def test_a_failed_write_leaves_the_former_pair(tmp_path: Path) -> None:
    before = pair_bytes(write_documents(tmp_path / "x", [[1, 2, 3]]))
    with (
        pytest.raises(RuntimeError, match="stop"),
        IndexedWriter(tmp_path / "x", "uint16") as writer,
    ):
        writer.add_document(np.array([9]))
        raise RuntimeError("stop")
    assert pair_bytes(tmp_path / "x") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


KILLED_AT_A_STEP = """
import os, signal, sys
import numpy as np
from pathlib import Path
from trainkit.data.indexed import dataset as indexed

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
    """Kill a writer before each of its steps on disk: what is left is the old pair, the new
    pair, or no .idx."""
    seen = set()
    root = Path(__file__).resolve().parents[3]
    for step in range(12):
        prefix = write_documents(tmp_path / "x", [[1, 2, 3]])
        old = pair_bytes(prefix)
        argv = [sys.executable, "-c", KILLED_AT_A_STEP, str(prefix), str(step)]
        child = subprocess.run(
            argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False
        )
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        if (tmp_path / "x.idx").exists():
            IndexedDataset(prefix).verify()
            seen.add("old" if pair_bytes(prefix) == old else "new")
        else:
            seen.add("none")
    assert child.returncode == 0, "the writer has more steps than the test kills"
    assert seen == {"old", "none", "new"}
