"""Documents of a split, as Megatron-LM counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.conftest import Project
from trainkit.engines.megatron_lm.engine import split_documents


@pytest.mark.parametrize(
    ("split", "documents", "expected"),
    [
        ("80,10,10", 100, [80, 10, 10]),
        ("949,50,1", 100, [95, 5, 0]),
        ("969,30,1", 1, [1, 0, 0]),
        ("1,1,0", 3, [2, 1, 0]),
        ("100", 7, [7, 0, 0]),
        ("99990/8/2", 100_000, [99990, 8, 2]),
    ],
)
def test_documents_go_where_the_engine_puts_them(
    split: str, documents: int, expected: list[int]
) -> None:
    assert split_documents(split, documents) == expected


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), st.integers(0, 10**6))
def test_every_document_goes_somewhere(weights: list[int], documents: int) -> None:
    counts = split_documents(",".join(map(str, weights)), documents)
    assert sum(counts) == documents
    assert all(count >= 0 for count in counts)
    assert all(weight or not count for weight, count in zip(weights, counts, strict=True))


def test_a_split_without_a_document_is_refused_before_the_start(
    project: Project, tmp_path: Path
) -> None:
    """One text of one document: the engine itself hangs."""
    tree = tmp_path / "tree"
    (tree / "megatron" / "core").mkdir(parents=True)
    (tree / "pretrain_gpt.py").write_text("raise SystemExit('it was started')\n")
    (tree / "megatron" / "core" / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 12\nPATCH = 0\nPRE_RELEASE = ''\n"
    )
    (tmp_path / "corpus" / "part-0.jsonl").unlink()
    (tmp_path / "corpus" / "part-1.jsonl").write_text('{"text": "' + "a b c d " * 500 + '"}\n')
    jobs = tmp_path / "jobs.toml"
    text = jobs.read_text().replace("[jobs.text]\n", '[jobs.text]\nengine = "megatron-lm"\n')
    jobs.write_text(f'{text}\n[engines.megatron-lm]\nsource = "{tree}"\n')
    said = project.invoke("train", "text", "--set", "parallelism.zero_stage=0", exit=3)
    assert "leaves the valid split no document" in said.stderr
    assert "it was started" not in said.stdout
