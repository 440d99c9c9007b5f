"""Documents in a random order: all of them, whole, and the same order however little memory
there is."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.data.pairs import pair_bytes, write_sequences
from tests.shared import MISSING, golden
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.tokenize import shuffle
from trainkit.data.tokenize.shuffle import MINIMUM_MEMORY, shuffle_documents

GOLDEN = golden()
Document = tuple[tuple[int, ...], ...]  # sequences of tokens
ROOT = Path(__file__).resolve().parents[3]


def _documents(prefix: Path) -> list[Document]:
    data = IndexedDataset(prefix)
    sequences = [tuple(data[i].tolist()) for i in range(len(data))]
    bounds = data.document_indices.tolist()
    return [tuple(sequences[a:b]) for a, b in itertools.pairwise(bounds)]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _numbered(folder: Path, documents: int, tokens: int = 3) -> Path:
    """Documents that say which they are: document d is d, d, d."""
    with IndexedWriter(folder / "numbered", "int32") as writer:
        writer.add_documents(
            np.repeat(np.arange(documents, dtype=np.int32), tokens), np.full(documents, tokens)
        )
    return folder / "numbered"


def _order(folder: Path, source: Path, seed: int, memory_bytes: int = 2**20) -> list[int]:
    shuffle_documents([source], folder / f"out{seed}", seed, memory_bytes)
    return [document[0][0] for document in _documents(folder / f"out{seed}")]


sequences = st.lists(st.integers(0, 65535), max_size=5).map(tuple)
documents = st.lists(st.lists(sequences, max_size=3).map(tuple), max_size=30)


@given(
    st.lists(documents, min_size=1, max_size=3),
    st.integers(0, 2**63 - 1),
    st.integers(MINIMUM_MEMORY, 2**14),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_document_is_kept_whole_and_memory_does_not_matter(
    tmp_path: Path, pairs: list[list[Document]], seed: int, memory_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # hundreds of files that need not outlive a power cut
        patch.setattr(os, "fsync", lambda _: None)
        prefixes = [
            write_sequences(tmp_path / f"in{i}", content) for i, content in enumerate(pairs)
        ]
        shuffle_documents(prefixes, tmp_path / "out" / "small", seed, memory_bytes)
        shuffle_documents(prefixes, tmp_path / "out" / "large", seed)
    assert Counter(_documents(tmp_path / "out" / "small")) == Counter(
        document for content in pairs for document in content
    )
    assert pair_bytes(tmp_path / "out" / "small") == pair_bytes(tmp_path / "out" / "large")
    assert _names(tmp_path / "out") == ["large.bin", "large.idx", "small.bin", "small.idx"]


def _web_like(folder: Path) -> list[Path]:
    """Two pairs of 3,000 documents: a few very long, many empty, some of several sequences, some
    of an empty sequence."""
    rng = np.random.default_rng(5)
    prefixes = []
    for pair in range(2):
        content: list[Document] = []
        for _ in range(3000):
            count = int(rng.choice([0, 1, 1, 1, 1, 2, 5]))
            lengths = np.minimum(rng.lognormal(2, 2, count), 20_000).astype(int)
            content.append(tuple(tuple(rng.integers(0, 50_000, n).tolist()) for n in lengths))
        prefixes.append(write_sequences(folder / f"web{pair}", content))
    return prefixes


def test_a_few_kilobytes_of_memory_give_the_order_of_a_gigabyte(tmp_path: Path) -> None:
    prefixes = _web_like(tmp_path)
    shuffle_documents(prefixes, tmp_path / "large", 1)
    for memory_bytes in (MINIMUM_MEMORY, 2**16, 2**20 + 1):
        shuffle_documents(prefixes, tmp_path / "small", 1, memory_bytes)
        assert pair_bytes(tmp_path / "small") == pair_bytes(tmp_path / "large")
    given_in, taken_out = (
        [d for p in prefixes for d in _documents(p)],
        _documents(tmp_path / "large"),
    )
    assert len(taken_out) == 6000 and () in taken_out and max(map(len, taken_out)) == 5
    assert Counter(taken_out) == Counter(given_in)
    # empty ones meet often
    assert sum(a == b for a, b in zip(given_in, taken_out, strict=True) if a) < 60


def test_the_order_is_the_permutation_of_the_documents_numbers(tmp_path: Path) -> None:
    """Of all pairs together; fixed, so that the same seed gives the same data in later versions."""
    source = _numbered(tmp_path, 1000)
    order = _order(tmp_path, source, 7)
    places = np.empty(1000, np.int64)
    _index.permute(
        1000,
        int.from_bytes(
            hashlib.blake2b(b"trainkit-shuffle/1 7 1000", digest_size=8).digest(), "little"
        ),
        0,
        places,
    )
    assert np.array_equal(np.array(order)[places], np.arange(1000))
    assert order[:8] == [
        616,
        468,
        408,
        37,
        501,
        661,
        89,
        242,
    ], "shuffled data would differ from what an earlier version wrote"


def test_seeds_and_the_number_of_documents_have_orders_of_their_own(tmp_path: Path) -> None:
    n = 2000
    source = _numbered(tmp_path, n)
    orders = [_order(tmp_path, source, seed) for seed in (0, 1)]
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 12  # Poisson of mean 1
    for order in orders:
        assert sum(place == document for place, document in enumerate(order)) < 12
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.skipif(GOLDEN is None, reason=MISSING)
@pytest.mark.parametrize("memory_bytes", [MINIMUM_MEMORY, 2**24])
def test_pairs_that_megatron_wrote(memory_bytes: int, tmp_path: Path) -> None:
    assert GOLDEN is not None
    prefixes = [GOLDEN / "tok_u16", GOLDEN / "tok_multi_u16", GOLDEN / "pre_eod1_text_document"]
    shuffle_documents(prefixes, tmp_path / "out", 3, memory_bytes)
    assert Counter(_documents(tmp_path / "out")) == Counter(
        d for p in prefixes for d in _documents(p)
    )
    shuffle_documents([GOLDEN / "tok_i32"], tmp_path / "out", 3, memory_bytes)
    assert Counter(_documents(tmp_path / "out")) == Counter(_documents(GOLDEN / "tok_i32"))
    assert IndexedDataset(tmp_path / "out").dtype == np.int32


def test_data_without_documents(tmp_path: Path) -> None:
    write_sequences(tmp_path / "none", [])
    write_sequences(tmp_path / "empty", [()] * 5)
    shuffle_documents([tmp_path / "none"], tmp_path / "out", 0)
    assert pair_bytes(tmp_path / "out") == pair_bytes(tmp_path / "none")
    shuffle_documents([tmp_path / "none", tmp_path / "empty"], tmp_path / "out", 0)
    assert pair_bytes(tmp_path / "out") == pair_bytes(tmp_path / "empty")


def test_progress_ends_at_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    shuffle_documents(
        _web_like(tmp_path), tmp_path / "out", 1, 2**16, lambda done, of: seen.append((done, of))
    )
    assert len(seen) > 100 and seen == sorted(seen) and seen[-1] == (12_000, 12_000)


def test_a_damaged_pair_is_refused(tmp_path: Path) -> None:
    """Damage in the middle of .idx: what its ends do not show."""
    source = _numbered(tmp_path, 1000)
    index = tmp_path / "numbered.idx"
    content = bytearray(index.read_bytes())
    content[34 + 4 * 500 : 34 + 4 * 502] = np.array([-2, 8], "<i4").tobytes()
    index.write_bytes(content)
    with pytest.raises(ConfigError, match="500") as caught:
        shuffle_documents([source], tmp_path / "out" / "x", 0)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_shuffled_is_refused(tmp_path: Path) -> None:
    write_sequences(tmp_path / "a", [((1,),)])
    write_sequences(tmp_path / "b", [((1,),)], "int32")
    with pytest.raises(ConfigError, match=r"b\.idx: holds int32, but a is of uint16") as caught:
        shuffle_documents([tmp_path / "a", tmp_path / "b"], tmp_path / "out", 0)
    assert caught.value.exit == Exit.STAGE_FAILED
    with pytest.raises(ConfigError, match="nothing to shuffle"):
        shuffle_documents([], tmp_path / "out", 0)
    with pytest.raises(ConfigError, match="4095 bytes of memory"):
        shuffle_documents([tmp_path / "a"], tmp_path / "out", 0, 4095)
    if GOLDEN is not None:
        with pytest.raises(ConfigError, match="is multimodal"):
            shuffle_documents([GOLDEN / "tok_modal_i32"], tmp_path / "out", 0)
    assert _names(tmp_path) == ["a.bin", "a.idx", "b.bin", "b.idx"]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_failure_half_way_leaves_nothing(fraction: float, tmp_path: Path) -> None:
    prefixes = _web_like(tmp_path)

    def stop(done: int, of: int) -> None:
        if done > fraction * of:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shuffle_documents(prefixes, tmp_path / "out" / "x", 1, 2**16, stop)
    assert _names(tmp_path / "out") == []


def test_a_pair_that_became_shorter_is_told(tmp_path: Path) -> None:
    source = _numbered(tmp_path, 1000)
    with pytest.MonkeyPatch.context() as patch:
        opened = shuffle._open

        def truncate(prefixes: list[Path], out_prefix: Path) -> list[IndexedDataset]:
            pairs = opened(prefixes, out_prefix)
            os.truncate(tmp_path / "numbered.bin", 6000)
            return pairs

        patch.setattr(shuffle, "_open", truncate)
        with pytest.raises(ConfigError, match=r"numbered\.bin became shorter") as caught:
            shuffle_documents([source], tmp_path / "out", 0)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert _names(tmp_path) == ["numbered.bin", "numbered.idx"]


KILLED = """
import os, signal, sys
from pathlib import Path
from trainkit.data.tokenize.shuffle import shuffle_documents

def die(done, of):
    if done > float(sys.argv[3]) * of:
        os.kill(os.getpid(), signal.SIGKILL)

shuffle_documents([Path(sys.argv[1])], Path(sys.argv[2]), 0, 2**16, die)
"""


def test_sigkill_leaves_no_pair_and_no_bucket(tmp_path: Path) -> None:
    """Only the writer's own unfinished .bin, which the next run of the stage removes by its
    name."""
    source = _numbered(tmp_path, 5000)
    for fraction in ("0.3", "0.8"):
        argv = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out" / "x"), fraction]
        assert subprocess.run(argv, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert len(_names(tmp_path / "out")) == 2
    assert all(name.startswith("x.bin.tmp-") for name in _names(tmp_path / "out"))


MEASURED = """
import sys
from pathlib import Path
from trainkit.data.tokenize.shuffle import shuffle_documents

def status(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = status("VmRSS")
shuffle_documents([Path(sys.argv[1])], Path(sys.argv[2]), 0, int(sys.argv[3]))
print(status("VmHWM") - before)
"""


def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    """80 MB of tokens in 40,000 documents with 8 MiB, and 1.2 MB in 300,000 documents."""
    rng = np.random.default_rng(0)
    for name, documents, tokens in (("long", 40_000, 1000), ("short", 300_000, 2)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(10):
                writer.add_documents(
                    rng.integers(0, 65536, documents // 10 * tokens).astype(np.uint16),
                    np.full(documents // 10, tokens),
                )
        argv = [
            sys.executable,
            "-c",
            MEASURED,
            str(tmp_path / name),
            str(tmp_path / "out"),
            str(2**23),
        ]
        taken = int(
            subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        )
        # of .idx: pages of the file, which the system takes back at will
        index_mapped = 20 * documents
        assert taken < 2**23 + 20 * documents + index_mapped + 2 * 2**20, name
