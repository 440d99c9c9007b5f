"""What curation is given that is not as it should be: one clear error, or it goes on; what is
mended then is taken."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from tests.conftest import Project
from tests.stages.curation_project import JOBS, below, curated, funnel, write_rows
from trainkit.data.tokenizer import train_bpe

PREPARE = ("prep-data", "--dataset", "crawl")
EXACT = '{ step = "exact" }'
OWN = '{ step = "function", function = "own.py:keep", timeout_seconds = 0.5 }'


@pytest.fixture
def crawl(project: Project) -> Project:
    """A project with a tokenizer for the dataset `crawl`, which `make` describes."""
    train_bpe(iter(["a b c d"] * 50), 320, "<|endoftext|>").save(str(project.path / "words.json"))
    return project


def make(
    project: Project, steps: str, rows: list[dict[str, Any]] | None = None, keys: str = ""
) -> None:
    """Describe the dataset `crawl`, in place of what was said of it."""
    text = (project.path / "jobs.toml").read_text().partition("\n[tokenizers.words]")[0]
    curate = f"\n{keys}\n[datasets.crawl.curate]\nsteps = [\n{steps}\n]\n"
    (project.path / "jobs.toml").write_text(text + JOBS + curate)
    if rows is not None:
        write_rows(project.path / "crawl/0.jsonl", rows)


def row(text: object, **fields: object) -> dict[str, Any]:
    return {"text": text, **fields}


ROWS = [row("hello"), row("h"), row("world")]
REFUSED_TABLES = [
    ("", "[datasets.crawl.curate]|curate needs a recipe or steps", ""),
    ('{ step = "exakt" }', "curate.steps: there is no 'exakt'", "did you mean 'exact'?"),
    (
        '{ step = "pii" }, { step = "exact", uint = "line" }',
        "curate.steps[1]: unknown key 'uint' of 'exact'",
        "did you mean 'unit'?",
    ),
    ('{ unit = "line" }', "datasets.crawl.curate.steps", "step"),
    ('{ step = "minhash", bands = 300 }', "steps[0].bands = 300 must be at most 256", ""),
    ('{ step = "sample", rate = 1e12 }', "must be at most 1000", ""),
    ('{ step = "sample", rates = { a = 1 } }', "rates and scores need field", ""),
    ('{ step = "function", function = "own" }', "does not match", "steps[0].function"),
    ('{ step = "exact", against = ["crawl"] }', "against 'crawl', the dataset itself", ""),
    (
        '{ step = "sample", field = "a", rates = { b = 2 } }, { step = "pii" }, { step = "exact" }',
        "'exact' takes out the copies that 'sample' makes before it",
        "put 'sample' behind it",
    ),
    # what leaves nothing out, or everything, or cannot be what was meant
    ('{ step = "length", min_words = 9, max_words = 8 }', "min_words = 9 above", ""),
    (
        '{ step = "gopher-quality", min_average_length = 11 }',
        "above max_average_length = 10 leaves nothing",
        "",
    ),
    ('{ step = "gopher-quality", stop_words = ["der"] }', "min_stop_words = 2 of 1", ""),
    ('{ step = "url", words = ["foo-bar"] }', "words: 'foo-bar' cannot be found", ""),
    ('{ step = "url", soft_words = [""] }', "soft_words: '' cannot be found", ""),
    ('{ step = "url", subwords = ["-"] }', "subwords: '-' cannot be found", ""),
    (
        '{ step = "score", model = "m", label = "hq", field = "trainkit_id" }',
        "the field 'trainkit_id' is not for a score",
        "",
    ),
    (
        '{ step = "score", model = "m", label = "hq", field = "text" }',
        "the field 'text' is not for a score",
        "",
    ),
    ('{ step = "sample", field = "a", scores = [[0.1, 1], [0.9, 2]] }', "scores must fall", ""),
    (
        '{ step = "sample", rate = 0.5 }, { step = "sample", rate = 1.5 },'
        ' { step = "sample", rate = 0.5, seed = 1 }',
        "two steps 'sample' draw with seed 0",
        "give it seed = 2",
    ),
    (
        '{ step = "function", function = "own.py:keep", timeout_seconds = 1e300 }',
        "must be at most 86400",
        "",
    ),
]


@pytest.mark.parametrize(("steps", "message", "hint"), REFUSED_TABLES)
def test_a_table_that_is_refused(crawl: Project, steps: str, message: str, hint: str) -> None:
    make(crawl, steps, ROWS)
    error = crawl.invoke(*PREPARE, exit=3).stderr
    assert error.startswith("error: jobs.toml:") and message.rpartition("|")[2] in error
    assert hint in error
    assert not (crawl.path / "data/crawl").exists()


def test_a_recipe_that_is_none(crawl: Project) -> None:
    make(crawl, EXACT, ROWS)
    crawl.edit_jobs("[datasets.crawl.curate]", '[datasets.crawl.curate]\nrecipe = "finweb"')
    error = crawl.invoke(*PREPARE, exit=3).stderr
    assert "recipe: expected 'fineweb', 'gopher' or 'c4', got the string 'finweb'" in error


FUNCTIONS = [
    (
        "def keep(text, fields): raise ValueError('no')",
        "raised ValueError: no (",
        "crawl/0.jsonl:1",
    ),
    (
        "import time\ndef keep(text, fields): time.sleep(9)",
        "did not return within 0.5 s",
        "0.jsonl",
    ),
    ("def keep(text, fields): return 1.5", "returned 1.5", "return True, False or the text"),
    ("import sys\ndef keep(text, fields): sys.exit(0)", "raised SystemExit: 0", "0.jsonl:1"),
    ("raise SystemExit(0)", "cannot be imported: SystemExit", ""),
    ("def other(text, fields): return True", "has no attribute 'keep'", ""),
    ("keep = 5", "keep is not a function", ""),
    ("def keep(text, fields) return True", "SyntaxError", "line 1"),
    (
        "def keep(text, fields): return text + '\\ud800'",
        "returned half of a character",
        "0.jsonl:1",
    ),
    (
        "def keep(text, fields):\n    fields['all'] = fields\n    return True",
        "the fields of",
        "crawl/0.jsonl:1 cannot be written: Circular reference detected",
    ),
    (None, "own.py, which is not there", "relative to the folder of jobs.toml"),
]


@pytest.mark.parametrize(("body", "message", "hint"), FUNCTIONS)
def test_a_function_that_fails(crawl: Project, body: str | None, message: str, hint: str) -> None:
    """And when it is mended, it goes on."""
    make(crawl, OWN, ROWS)
    if body is not None:
        (crawl.path / "own.py").write_text(body)
    error = crawl.invoke(*PREPARE, exit=6).stderr
    assert message in error and hint in error and error.count("error:") == 1
    assert not list(crawl.path.rglob("*.tmp-*"))
    (crawl.path / "own.py").write_text("def keep(text, fields): return len(text) > 1")
    crawl.invoke(*PREPARE)
    assert [row["text"] for row in curated(crawl)] == ["hello", "world"]


WILD = """
from __future__ import annotations
import os, sys
from dataclasses import dataclass

print('{"result": {"documents": 77}}')

@dataclass
class Seen:
    texts: list[str]

seen = Seen([])

def keep(text, fields):
    print('{"result": {}}')
    print("no end of line", end="")
    sys.stdout = None
    os.chdir("/")
    os.environ.clear()
    fields.clear()
    fields.update({"a": {1}, 3: b"x", "text": "other", "none": None})
    seen.texts.append(text)
    return text.upper()
"""


def test_a_function_that_does_as_it_likes(crawl: Project) -> None:
    """It prints what looks like a unit's report, throws the document's fields away, uses
    dataclasses: the report is the unit's, and the document can be found."""
    (crawl.path / "own.py").write_text(WILD)
    make(crawl, f"{OWN}, {EXACT}", [*ROWS, row("HELLO")])
    crawl.invoke(*PREPARE)
    found = curated(crawl)
    assert [row["text"] for row in found] == ["HELLO", "H", "WORLD"]
    for each in found:
        assert each.keys() == {"text", "a", "3", "trainkit_id", "trainkit_origin"}
    assert funnel(crawl)["lines"] == 4
    assert "own.py" not in {path.name for path in crawl.path.glob("__pycache__/*")}
    assert not (crawl.path / "__pycache__/own.cpython-311.pyc").exists()


def test_texts_of_all_kinds(crawl: Project) -> None:
    """Blank ones, lists of strings, half characters and large numbers in fields, ids of ours."""
    make(
        crawl,
        f'{EXACT}, {{ step = "exact", unit = "line" }}, {{ step = "exact", unit = "paragraph" }}',
        [
            *map(row, ["", " ", "\n\n\n", "a\n", "a\n\n\nb\n\n", "  a  \nb", []]),
            *(row(["x", "y"]), row("x\ny", n=2**70), row("z", id="\ud800", nan=float("nan"))),
            *(row("z", id="\ud801"), row("w", trainkit_id="mine", trainkit_origin=3)),
        ],
    )
    crawl.invoke(*PREPARE)
    found = curated(crawl)
    texts = [row["text"] for row in found]
    assert {"", " ", "\n\n\n", "w", "z"} <= set(texts) and texts.count("z") == 1
    assert len([text for text in texts if "x" in text]) == 1
    assert sum(text.count("a") for text in texts) == sum(text.count("b") for text in texts) == 1
    assert all(
        len(row["trainkit_id"]) == 16 and "0.jsonl:" in row["trainkit_origin"] for row in found
    )
    dropped = crawl.document("data-stats", "crawl", "--curation")
    assert dropped["datasets"][0]["lines"] == 12


def test_text_below_a_key_is_not_kept_twice(crawl: Project) -> None:
    """What is masked in the text must not be left beside it."""
    make(
        crawl,
        '{ step = "pii" }',
        [{"a": {"b": "write to me@corp.example.net", "c": 1}}, {"a.b": "plain"}],
        'text_key = "a.b"',
    )
    crawl.invoke(*PREPARE)
    found = [{k: v for k, v in row.items() if k[:9] != "trainkit_"} for row in curated(crawl)]
    assert found == [{"a.b": "write to email@example.com", "a": {"c": 1}}, {"a.b": "plain"}]


def test_bad_lines(crawl: Project) -> None:
    """They stop it, or are kept beside the dataset, whatever passes follow."""
    make(crawl, EXACT)
    (crawl.path / "crawl").mkdir()
    lines = b'{"text": "a\xff"}\n{"text": "good"}\n{"text": "half \\ud800"}\n{"text": ""}\n'
    (crawl.path / "crawl/0.jsonl").write_bytes(lines)
    error = crawl.invoke(*PREPARE, exit=6).stderr
    assert "crawl/0.jsonl:1: holds invalid UTF-8" in error
    make(crawl, EXACT, None, 'on_error = "skip"\nmax_reject_fraction = 0.5')
    (shown,) = crawl.document(*PREPARE)["datasets"]
    assert shown["rejects"] == 2 == sum(shown["rejected"].values())
    assert [row["text"] for row in curated(crawl)] == ["good", ""]
    rejects = below(crawl)["curated/rejects/00000.jsonl"].splitlines()
    assert [json.loads(line)["line"] for line in rejects] == [1, 3]
    assert funnel(crawl)["rejects"] == 2


def test_a_tokenizer_that_is_not_there_is_missed_first(crawl: Project) -> None:
    make(crawl, EXACT, ROWS)
    (crawl.path / "words.json").rename(crawl.path / "former.json")
    error = crawl.invoke(*PREPARE, exit=6).stderr
    assert "tokenizers.words: " in error and "words.json is not there" in error
    assert not (crawl.path / "data/crawl").exists()


def test_sample_before_a_comparison_may_leave_out(crawl: Project) -> None:
    make(crawl, f'{{ step = "sample", rate = 0.5 }}, {EXACT}', 9 * [row("one"), row("two")])
    crawl.invoke(*PREPARE)
    steps = funnel(crawl)["steps"]
    assert steps[0]["documents_in"] == 18 and len(curated(crawl)) == steps[1]["documents_out"] <= 2


def test_nothing_is_left(crawl: Project) -> None:
    """The step that took most is named, and its examples can be looked at."""
    make(crawl, f'{{ step = "length", min_characters = 99 }}, {EXACT}', ROWS)
    for _ in range(2):
        error = crawl.invoke(*PREPARE, exit=6).stderr
        assert (
            "leaves no text of 3 documents: step 1 (length) left out most, 3 of 3 for"
            " too_few_characters" in error
        )
    assert "too_few_characters" in crawl.invoke("data-stats", "crawl", "--curation").stdout
    assert not (crawl.path / "data/crawl/words").exists()
    make(crawl, f'{{ step = "length", min_characters = 3 }}, {EXACT}')
    crawl.invoke(*PREPARE)
    assert len(curated(crawl)) == 2
    make(crawl, EXACT, [])
    assert "no text in the 0 documents" in crawl.invoke(*PREPARE, exit=6).stderr


QUESTION = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
BESIDE = [
    (
        '"decontaminate", benchmarks = ["beside*"]',
        "beside.jsonl",
        b'{"q": "word"}',
        "no entry of 8",
    ),
    ('"decontaminate", benchmarks = ["beside*"]', None, b"", "beside*' matches no file"),
    ('"decontaminate", benchmarks = ["beside*"]', "beside.jsonl", b"none", "is not JSON"),
    ('"decontaminate", benchmarks = ["beside*"]', "beside.parquet", b"none", "is not Parquet"),
    ('"language", model = "beside"', "beside", b"a text\n" * 9, "as a fastText model"),
    ('"language", model = "beside"', "beside", b"", "as a fastText model"),
    ('"score", model = "beside", label = "x"', None, b"", "which is not there"),
    ('"url", domains = ["beside"]', "beside", b"a.com\n\xe4\n", "is not UTF-8, at byte 6"),
]


@pytest.mark.parametrize(("step", "name", "data", "message"), BESIDE)
def test_files_of_steps(
    crawl: Project, step: str, name: str | None, data: bytes, message: str
) -> None:
    make(crawl, f"{{ step = {step} }}", [row(f"so: {QUESTION}", url="http://a.com/")])
    if name:
        (crawl.path / name).write_bytes(data)
    error = crawl.invoke(*PREPARE, exit=6).stderr
    assert message in error and "beside" in error and error.count("error:") == 1


def test_tables_and_plain_text(crawl: Project) -> None:
    """Columns of all types, read and written; a .txt of several documents."""
    (crawl.path / "crawl").mkdir()
    table = arrow.table(
        {
            "body": ["one", "two", "one"],
            "bytes": [b"\xff"] * 3,
            "deep": [{"x": [1, None]}] * 3,
            "nan": [float("nan")] * 3,
        }
    )
    parquet.write_table(table, crawl.path / "crawl/0.parquet")
    make(crawl, f'{EXACT}, {{ step = "sample", rate = 2 }}', None, 'text_key = "body"')
    crawl.edit_jobs("crawl/*.jsonl", "crawl/*.parquet")
    crawl.edit_jobs("[datasets.crawl.curate]", '[datasets.crawl.curate]\noutput = "parquet"')
    crawl.invoke(*PREPARE)
    written = parquet.read_table(crawl.path / "data/crawl/curated/00000.parquet")
    assert written["body"].to_pylist() == ["one", "one", "two", "two"]
    assert set(table.column_names) <= set(written.column_names)
    (crawl.path / "crawl/0.txt").write_text("one====two====one")
    make(crawl, EXACT, None, 'text_separator = "===="')
    crawl.edit_jobs("crawl/*.jsonl", "crawl/*.txt")
    crawl.invoke(*PREPARE)
    assert [row["text"] for row in curated(crawl)] == ["one", "two"]


def test_one_document_very_often_and_a_long_one(crawl: Project) -> None:
    """Both searches in bounded memory; a line of 10 MB."""
    rows = [row("one two three four five six seven.")] * 20_000
    rows.append(row("1.a " * 2_500_000))
    make(crawl, '{ step = "minhash" }, { step = "exact", unit = "line" }, { step = "pii" }', rows)
    crawl.invoke(*PREPARE)
    assert [len(row["text"]) for row in curated(crawl)] == [34, 10_000_000]
    assert funnel(crawl)["steps"][0]["reasons"] == {"duplicate": 19_999}


def test_a_folder_that_cannot_be_written(crawl: Project) -> None:
    make(crawl, EXACT, ROWS)
    (crawl.path / "data").mkdir()
    (crawl.path / "data/crawl").write_text("a file")
    error = crawl.invoke(*PREPARE, exit=6).stderr
    assert "data/crawl" in error and "Not a directory" in error
    (crawl.path / "data/crawl").unlink()
    crawl.invoke(*PREPARE)
    assert len(curated(crawl)) == 3
