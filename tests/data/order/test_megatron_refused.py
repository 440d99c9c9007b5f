"""Megatron's sample order: what is refused, and writes that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.megatron_cases import (
    documents_of,
    request_of,
    write_pair,
)
from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.order.megatron_index import (
    MegatronIndex,
    build_index,
    cache_names,
    read_index_sizes,
)


def test_an_index_of_something_else_is_refused(tmp_path: Path) -> None:
    lengths = [5, 9, 30]
    request = request_of(write_pair(tmp_path / "pair", lengths), lengths)
    with pytest.raises(ConfigError, match="is not built: there is no") as caught:
        MegatronIndex(tmp_path, request)
    assert caught.value.exit == Exit.STAGE_FAILED
    build_index(request, tmp_path, 1)
    MegatronIndex(tmp_path, request)
    # the same names, for Megatron does not tell these apart
    with pytest.raises(ConfigError, match="was built with request = "):
        MegatronIndex(tmp_path, replace(request, extra_token=False))
    names = cache_names(request)
    shuffle = names.path(tmp_path, "shuffle_index.npy")
    np.save(shuffle, np.load(shuffle)[:-1])
    with pytest.raises(ConfigError, match=r"holds uint32 \[4\], not uint32 \[5\]"):
        MegatronIndex(tmp_path, request)
    shuffle.write_bytes(b"\x93NUMPY")
    with pytest.raises(ConfigError, match="shuffle_index"):
        MegatronIndex(tmp_path, request)
    build_index(request, tmp_path, 1)
    write_pair(tmp_path / "pair", lengths)
    with pytest.raises(ConfigError, match="was built with idx = "):
        MegatronIndex(tmp_path, request)


@pytest.mark.parametrize(
    ("values", "words", "exit"),
    [
        ({"seed": -1}, r"seed -1 is outside \[0, 2\^32\)", Exit.CONFIG),
        ({"seed": 2**32}, "seed 4294967296 is outside", Exit.CONFIG),
        ({"num_samples": 0}, "num_samples is 0", Exit.CONFIG),
        ({"seq_length": 0}, "seq_length is 0", Exit.CONFIG),
        ({"seq_length": 2**31}, "seq_length is 2147483648", Exit.CONFIG),
        ({"drop_last": False}, "the train split drops its last partial sample", Exit.CONFIG),
        ({"first": 3, "last": 2}, "are not a range", Exit.CONFIG),
        ({"first": 2, "last": 2}, "the train split has no document", Exit.STAGE_FAILED),
    ],
)
def test_wrong_requests_are_refused(values: dict[str, Any], words: str, exit: Exit) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        request_of(Path("data/pile"), [1], **values)
    assert caught.value.exit == exit


def test_data_that_does_not_suffice_is_refused(tmp_path: Path) -> None:
    lengths = [3, 0, 5]
    prefix = write_pair(tmp_path / "pair", lengths)
    assert read_index_sizes(request_of(prefix, lengths, seq_length=7)).samples == 1
    for request, words in (
        (request_of(prefix, lengths), "has 8 tokens, fewer than one sample of 9"),
        (request_of(prefix, lengths, first=1, last=2), "has 0 tokens, fewer than one sample of 9"),
        (
            request_of(prefix, lengths, first=1, last=2, num_samples=10),
            "has 0 tokens, fewer than one sample of 9",
        ),
        (request_of(prefix, [1] * 4), "has 3 sequences, the train split was to end with number 3"),
        (request_of(tmp_path / "none", lengths), "none"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            build_index(request, tmp_path, 1)
        assert caught.value.exit == Exit.STAGE_FAILED
    assert [p.name for p in tmp_path.iterdir() if ".npy" in p.name] == []


def test_more_epochs_than_memory_are_refused(tmp_path: Path) -> None:
    lengths = [1, 1]
    request = request_of(write_pair(tmp_path / "pair", lengths), lengths, num_samples=2**39)
    with pytest.raises(ConfigError, match="take 32,768 GiB of memory") as caught:
        build_index(request, tmp_path, 1)
    assert caught.value.exit == Exit.STAGE_FAILED


def test_a_damaged_idx_is_refused(tmp_path: Path) -> None:
    """Lengths that are not the offsets' differences, where nobody looked before."""
    lengths = [3, 2, 5, 9]
    prefix = write_pair(tmp_path / "pair", lengths)
    path = tmp_path / "pair.idx"
    good = path.read_bytes()
    for value in (np.int32(3), np.int32(-2)):
        path.write_bytes(good[:38] + value.tobytes() + good[42:])  # the second length
        with pytest.raises(ConfigError, match=r"pair\.idx"):
            build_index(request_of(prefix, lengths), tmp_path, 1)
    path.write_bytes(good[:40])
    with pytest.raises(ConfigError, match=r"pair\.idx"):
        build_index(request_of(prefix, lengths), tmp_path, 1)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    lengths = [30, 9, 30]
    request = request_of(write_pair(tmp_path / "pair", lengths), lengths)
    build_index(request, tmp_path, 1)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= total // 2:
            raise Stop

    with pytest.raises(Stop):
        build_index(request, tmp_path, 1, progress=stop)
    assert not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]
    with pytest.raises(ConfigError, match="is not built"):
        MegatronIndex(tmp_path, request)
    with (
        open(tmp_path / "pair.idx", "rb") as file,
        pytest.raises(OSError, match="Bad file descriptor"),
    ):
        documents_of(tmp_path / "lengths", lengths).write_ids(file.fileno(), 0, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: _index.MegatronDocuments(0, 0, 1, 1, 1), "first < last"),
        (lambda g: _index.MegatronDocuments(0, 0, 0, 2**31, 1), "first < last"),
        (lambda g: _index.MegatronDocuments(0, 0, 0, 5, 0), "epochs"),
        (lambda g: _index.MegatronDocuments(0, 0, 0, 5, 1, chunk=0), "chunk"),
        (lambda g: _index.MegatronDocuments(0, 0, 0, 5, 2**62), "epochs"),
        (lambda g: _index.write_shuffle_index(g, 3, 2, False, 0, 0), "separate"),
        (lambda g: _index.write_shuffle_index(g, 1, 2**32, False, 0, 0), "64-bit"),
        (lambda g: _index.write_blend([], [], 0, 0, 0, 0, 0), "32,766"),
        (lambda g: _index.write_blend([1.0], [0], 0, 0, 0, 0, 0), "sizes"),
        (lambda g: _index.write_blend([1.0], [5], 6, 0, 0, 0, 0), "total"),
        (lambda g: g.shuffle(np.arange(9, dtype=np.uint32)[::2]), "contiguous"),
        (lambda g: g.shuffle(np.zeros((2, 2), np.int64)), "one-dimensional"),
        (lambda g: g.shuffle(np.frombuffer(bytes(8), np.uint32)), "writable"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(_index.MersenneTwister(1))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_a_seed_is_32_bits(seed: Any) -> None:
    with pytest.raises(TypeError):
        _index.MersenneTwister(seed)
