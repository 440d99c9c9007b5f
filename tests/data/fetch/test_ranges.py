"""{00..29} in addresses and paths."""

from __future__ import annotations

import pytest

from trainkit.base.errors import ConfigError
from trainkit.data.fetch.ranges import expand


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("plain", ["plain"]),
        ("a{8..11}", ["a8", "a9", "a10", "a11"]),
        ("{08..11}.zst", ["08.zst", "09.zst", "10.zst", "11.zst"]),
        ("c{1..2}/e{0..1}", ["c1/e0", "c1/e1", "c2/e0", "c2/e1"]),
        ("{3..3}", ["3"]),
        ("{a..b}{1.2}{}", ["{a..b}{1.2}{}"]),
    ],
)
def test_stands_for_every_number(pattern: str, texts: list[str]) -> None:
    assert expand(pattern) == texts


def test_the_sixty_thousand_addresses_of_slimpajama() -> None:
    addresses = expand("chunk{1..10}/example_train_{0..5999}.jsonl.zst")
    assert len(addresses) == len(set(addresses)) == 60_000
    assert (
        addresses[0] == "chunk1/example_train_0.jsonl.zst"
        and addresses[-1] == "chunk10/example_train_5999.jsonl.zst"
    )


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("{2..1}", "runs backwards"), ("{0..9999}{0..9999}", "100,000,000 texts")],
)
def test_refuses_what_cannot_be_meant(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expand(pattern)
