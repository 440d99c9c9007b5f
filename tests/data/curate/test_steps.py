"""The steps that look at one document: what they keep, what they change, what they say."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter

from tests.data.curate.curation_cases import documents
from trainkit.base.errors import ConfigError
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.steps import STEPS, pii
from trainkit.jobs.curation import Step

SENTENCE = (
    "A farmer has seventeen sheep and all but nine of them run away before the sun goes down over"
    " the northern hills, so how many are left?"
)

# of PIIFormatter, whole
DATATROVE_EMAIL = re.compile(
    r"\b[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@(?:(?:[A-Za-z0-9](?:["
    r"A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?|\[(?:(?:25[0-5]|2[0-4][0"
    r"-9]|[01]?[0-9][0-9]?)\.){3}(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?|[A-Za-z0-9-]*[A-Za-z0-9]:)"
    r"])"
)


def make(**table: Any) -> Any:
    """A step from its table."""
    checked: Step = TypeAdapter[Step](Step).validate_python(table)
    return STEPS[table["step"]](checked, "en")


def judge(step: Any, text: str, **fields: object) -> tuple[Dropped | None, CrawledDocument]:
    """(what the step says, the document afterwards)."""
    document = CrawledDocument(text, dict(fields), key=hash(text) % 2**64)
    return step(document), document


# ---- addresses


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://www.bad.example/x", "domain"),
        ("https://bad.example:8080/", "domain"),
        ("bad.example/path", "domain"),
        ("https://notbad.example/", None),
        ("https://bad.example.org/", None),
        ("https://good.org/page", "url"),
        ("https://good.org/page/2", None),
        ("https://good.org/casino-online", "hard_blacklisted"),
        ("https://good.org/casinos", None),
        ("https://good.org/free-adult-game", "soft_blacklisted"),
        ("https://good.org/free", None),
        ("https://good.org/x-x-x-tube", "blacklisted_subword"),
        ("http://[bad", None),
        ("", "no_url"),
        (None, "no_url"),
    ],
)
def test_url(tmp_path: Path, url: str | None, reason: str | None) -> None:
    (tmp_path / "domains").write_text("# a list\nBad.example\n\n")
    (tmp_path / "urls").write_text("https://good.org/page\n")
    step = make(
        step="url",
        domains=[str(tmp_path / "domains")],
        urls=[str(tmp_path / "urls")],
        words=["casino"],
        soft_words=["free", "adult"],
        subwords=["xxxtube"],
    )
    dropped, _ = judge(step, "text", **({} if url is None else {"url": url}))
    assert (dropped.reason if dropped else None) == reason


# ---- models


def test_language() -> None:
    step = make(step="language", languages=["en", "de"])
    dropped, document = judge(step, "This is a plain English sentence.\nAnd this is another one.")
    assert dropped is None and document.fields["language"] == "en"
    assert 0.65 < float(str(document.fields["language_score"])) <= 1
    dropped, document = judge(step, "Ceci est une phrase tout à fait ordinaire, en français.")
    assert dropped and (dropped.reason, dropped.detail) == ("language", "fr")
    assert judge(make(step="language"), "Ceci est une phrase ordinaire.")[0] is None
    assert judge(step, "")[0] is not None


@pytest.mark.parametrize("code", ["EN", "gr", "english"])
def test_a_language_that_the_model_does_not_know(code: str) -> None:
    with pytest.raises(ConfigError, match=f"knows no language '{code}'"):
        make(step="language", languages=["de", code])


def test_models_say_what_fasttext_says() -> None:
    fasttext = pytest.importorskip("fasttext")
    from trainkit._index import FastTextModel
    from trainkit.data.curate.step_files import language_model

    theirs, ours = fasttext.load_model(str(language_model())), FastTextModel(str(language_model()))
    for text in (*documents(1500), "words </s> nach dem Ende zählt nichts", "a\0b\x0bc __label__x"):
        line = text.replace("\n", " ")
        labels, scores = theirs.predict(line, k=1)
        label, score = ours.best(text)
        assert label == (labels[0] if labels else "")
        assert score == pytest.approx(float(scores[0]) if labels else 0, abs=2e-5)


@pytest.mark.parametrize("damage", [0, 7, 100, 5000, 400_000, -1])
def test_a_model_that_is_cut_off(tmp_path: Path, damage: int) -> None:
    from trainkit.data.curate.step_files import language_model

    data = language_model().read_bytes()
    path = tmp_path / "model.ftz"
    path.write_bytes(data[:damage])
    with pytest.raises(ConfigError, match="cannot be read as a fastText model"):
        make(step="language", model=str(path))
    path.write_text("not a model")
    with pytest.raises(ConfigError, match="cannot be read as a fastText model"):
        make(step="score", model=str(path), label="__label__hq")


def test_scores_of_ones_own_model() -> None:
    from trainkit.data.curate.step_files import language_model

    model = str(language_model())
    step = make(step="score", model=model, label="__label__de", min_score=0.5)
    dropped, document = judge(step, "Dies ist ein ganz gewöhnlicher deutscher Satz.")
    assert dropped is None and float(str(document.fields["quality_score"])) > 0.9
    dropped, _ = judge(step, "This is a plain English sentence.")
    assert dropped and dropped.reason == "score" and dropped.value < 0.1
    with pytest.raises(ConfigError, match="has no label '__label__hq'"):
        make(step="score", model=model, label="__label__hq")


# ---- text that is changed, copied or measured


def test_pii_hangs_on_the_document_alone() -> None:
    step = make(step="pii")
    text = "Mail a.b@c.org, d@e.com or f@g.net; hosts 8.8.8.8, 10.0.0.1, 1.1.1.1 and 010.1.1.1."
    found = [judge(step, text)[1].text for _ in range(2)]
    assert (
        found[0]
        == found[1]
        == (
            "Mail email@example.com, firstname.lastname@example.org or email@example.com; hosts"
            " 22.214.171.124, 10.0.0.1, 126.96.36.199 and 010.1.1.1."
        )
    )
    assert judge(make(step="pii", emails=False, ips=False), text)[1].text == text


@given(st.lists(st.sampled_from([*"ab1é_-+. \n@[]:", "1.2.3.4", "@b.org", "x@y.de"])))
def test_pii_finds_what_the_regex_of_datatrove_finds(pieces: list[str]) -> None:
    text = "".join(pieces)
    turns = itertools.cycle(pii.EMAILS)
    expected = DATATROVE_EMAIL.sub(lambda found: next(turns), text)
    assert judge(make(step="pii", ips=False), text)[1].text == expected


@pytest.mark.timeout(60)
def test_pii_reads_a_long_text_once() -> None:
    """The regex as a whole would try at every letter, to the end of the word: for days."""
    text = "Mail a@b.org. " + "a-" * 2_000_000 + "@" + "b-" * 100_000
    changed = judge(make(step="pii"), text)[1].text
    assert changed == text.replace("a@b.org", "email@example.com")


def test_length() -> None:
    step = make(step="length", min_characters=5, max_characters=40, min_words=2, max_words=6)
    reasons = {}
    for text in ("abc", "a" * 41, "abcdefg", "a b c d e f g h", "just right"):
        dropped, _ = judge(step, text)
        reasons[text] = dropped.reason if dropped else None
    assert list(reasons.values()) == [
        *("too_few_characters", "too_many_characters", "too_few_words", "too_many_words", None),
    ]


def test_sample_draws_by_the_document() -> None:
    step = make(step="sample", rate=0.25, seed=3)
    texts = [f"text number {i}" for i in range(4000)]
    dice = random.Random(1)
    keys = {text: dice.randrange(2**64) for text in texts}

    def kept(texts: list[str], step: Any) -> set[str]:
        return {t for t in texts if step(CrawledDocument(t, {}, keys[t])) is None}

    first = kept(texts, step)
    assert first == kept(texts[::-1], make(step="sample", rate=0.25, seed=3))
    assert 900 < len(first) < 1100 and first != kept(texts, make(step="sample", rate=0.25))
    assert first <= kept(texts, make(step="sample", rate=0.5, seed=3))


def test_sample_by_source_and_score() -> None:
    step = make(step="sample", rate=1, field="meta.set", rates={"wiki": 3, "spam": 0})
    assert judge(step, "x", meta={"set": "wiki"})[1].copies == 3
    assert judge(step, "x", meta={"set": "web"})[1].copies == 1
    dropped, _ = judge(step, "x", meta={"set": "spam"})
    assert dropped and dropped.reason == "not_sampled"
    step = make(step="sample", rate=1, field="f", rates={"2023": 2, "true": 3, "null": 4})
    assert [judge(step, "x", f=f)[1].copies for f in (2023, "2023", True, 1)] == [2, 2, 3, 1]
    assert judge(step, "x", f=None)[1].copies == judge(step, "x")[1].copies == 1
    step = make(step="sample", rate=0, field="score", scores=[[0.9, 2], [0.5, 1]])
    assert [judge(step, "x", score=s)[1].copies for s in (0.95, 0.9, 0.6)] == [2, 2, 1]
    assert judge(step, "x", score=0.4)[0] is not None and judge(step, "x")[0] is not None


# ---- benchmarks


@pytest.fixture
def benchmark_file(tmp_path: Path) -> Path:
    path = tmp_path / "sheep.jsonl"
    rows = [
        {"question": SENTENCE, "answer": "9"},
        {"question": "Short but long enough to be found whole"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planted(texts: list[str]) -> Iterator[tuple[str, str]]:
    """(how it was planted, a text that holds the sentence)."""
    words = SENTENCE.split()
    lines = "\n".join(" ".join(words[at : at + 4]) for at in range(0, len(words), 4))
    for name, sentence in {
        "verbatim": SENTENCE,
        "re-cased": SENTENCE.upper(),
        "re-punctuated": SENTENCE.replace(",", " --").replace("?", "!!!").replace(" ", ", "),
        "split over lines": lines,
        "thirteen of its words": " ".join(words[3:16]),
    }.items():
        yield name, f"{texts[0]}\n{sentence}\n{texts[1]}"


def test_planted_sentences_are_found_and_named(benchmark_file: Path) -> None:
    step = make(step="decontaminate", benchmarks=[str(benchmark_file)])
    texts = [text for text in documents(300, seed=8) if text.count("\n") > 1]
    for name, text in planted(texts):
        dropped, _ = judge(step, text)
        assert dropped and dropped.reason == "contaminated", name
        line = texts[0].count("\n") + 2
        assert dropped.detail.startswith(f"sheep.jsonl:1 in line {line}: "), (name, dropped.detail)
    dropped, _ = judge(step, "before: short, but LONG enough to be found whole. After")
    assert dropped and dropped.detail.startswith("sheep.jsonl:2 ")
    assert [judge(step, text)[0] for text in texts] == [None] * len(texts)
    assert judge(step, " ".join(SENTENCE.split()[3:15]))[0] is None  # twelve of its words


def test_numbers_and_phrases_are_not_contamination(tmp_path: Path) -> None:
    rows = [
        f"What is {i} plus {i + 7} and then times {i + 3} in plain figures please"
        for i in range(30)
    ]
    phrase = "which of the following is the correct answer to the question that is given below"
    path = tmp_path / "b.txt"
    path.write_text("\n".join([*rows, *(f"{phrase} number {i} word{i}" for i in range(30))]))
    step = make(step="decontaminate", benchmarks=[str(path)], max_entries=10)
    assert judge(step, rows[4])[0] is not None
    assert judge(step, rows[4].replace("4 plus", "99 plus"))[0] is None
    assert judge(step, phrase)[0] is None


@pytest.mark.parametrize(
    ("text", "words"),
    [("word\n", "has no entry of 8 words"), ('{"a": 1}\n', "has no entry"), ("[1, ", "not JSON")],
)
def test_benchmarks_that_would_find_nothing(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / ("b.txt" if text == "word\n" else "b.json")
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        make(step="decontaminate", benchmarks=[str(path)])
    with pytest.raises(ConfigError, match="matches no file"):
        make(step="decontaminate", benchmarks=[str(tmp_path / "none*")])


# ---- a function of one's own


def own(tmp_path: Path, body: str, **table: Any) -> Any:
    path = tmp_path / "own.py"
    path.write_text(f"import time\n\n\ndef rule(text, fields):\n    {body}\n")
    return make(step="function", function=f"{path}:rule", **table)


def test_own_function(tmp_path: Path) -> None:
    assert judge(own(tmp_path, "return 'a' in text"), "abc")[0] is None
    dropped, _ = judge(own(tmp_path, "return 'a' in text"), "xyz")
    assert dropped and (dropped.reason, dropped.detail) == ("function", "own.py:rule")
    _, document = judge(own(tmp_path, "fields['n'] = len(text); return text.upper()"), "abc")
    assert (document.text, document.fields["n"]) == ("ABC", 3)
    fields = {"trainkit_id": "00", "trainkit_origin": "crawl.jsonl:7", "url": "a.org"}
    _, document = judge(own(tmp_path, "fields.clear(); return True"), "abc", **fields)
    assert document.fields == {"trainkit_id": "00", "trainkit_origin": "crawl.jsonl:7"}


def test_own_file_with_a_dataclass(tmp_path: Path) -> None:
    """It asks for its module by name."""
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    least: int\n"
        "def rule(text, fields):\n    return len(text) >= Rule(3).least\n"
    )
    assert judge(make(step="function", function=f"{path}:rule"), "abc")[0] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError(text)", r"raised KeyError: 'abc' \(.*own.py:5\)"),
        ("return 3", "returned 3"),
        ("while True: pass", "did not return within 0.2 s"),
        ("time.sleep(60)", "did not return within 0.2 s"),
        ("import sys; sys.exit(3)", "raised SystemExit"),
    ],
)
def test_own_function_that_does_not_do(tmp_path: Path, body: str, words: str) -> None:
    step = own(tmp_path, body, timeout_seconds=0.2)
    with pytest.raises(ConfigError, match=words) as caught:
        judge(step, "abc", trainkit_origin="crawl.jsonl:7")
    assert "crawl.jsonl:7" in str(caught.value)


def test_own_function_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SyntaxError"):
        own(tmp_path, "return (")
    own(tmp_path, "return True")
    with pytest.raises(ConfigError, match="has no attribute 'other'"):
        make(step="function", function=f"{tmp_path / 'own.py'}:other")
