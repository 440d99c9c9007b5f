"""data-why: what became of one document, and what it shows of it."""

from __future__ import annotations

import json

from tests.conftest import Project

CURATED = """
[datasets.letters]
source = "files"
paths = ["letters.jsonl"]
tokenizer = "bpe"

[datasets.letters.curate]
steps = [{ step = "exact" }, { step = "length", min_words = 4 }]
"""
LETTERS = {
    "long": "Dear friend, the snow has gone and the road is open again.",
    "short": "Come soon!",
    "copy": "Dear friend, the snow has gone and the road is open again.",
}


def write_letters(project: Project, **changed: str) -> None:
    rows = [{"id": name, "text": text} for name, text in {**LETTERS, **changed}.items()]
    (project.path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_document_is_shown_as_it_was_read(project: Project) -> None:
    project.add_to_jobs(CURATED)
    write_letters(project)
    project.invoke("prep-data", "--dataset", "letters")
    short = project.invoke("data-why", "letters", "short").stdout
    assert "letters.jsonl:2\nleft out by step 2, length: too_few_words, value 3, limit 4" in short
    assert "Come soon!" in short
    fates = {name: project.document("data-why", "letters", name) for name in LETTERS}
    (twin,) = (fates[name] for name in ("long", "copy") if fates[name]["reason"] == "duplicate")
    (kept,) = (fates[name] for name in ("long", "copy") if not fates[name]["reason"])
    assert twin["kept"]["id"] == kept["id"] and twin["original"] == LETTERS["long"]
    said = project.invoke("data-why", "letters", twin["id"]).stdout
    assert f"duplicate (of {kept['id']}), 2 documents are alike\nkept instead:" in said

    write_letters(project, short="Another text stands here now.")
    changed = project.invoke("data-why", "letters", "short").stdout
    assert "is not here any more, or was changed" in changed
    assert "Come soon!" in changed and "Another" not in changed
    unknown = project.invoke("data-why", "letters", "nobody", exit=3).stderr
    assert "no document 'nobody' was read" in unknown and "trainkit_id" in unknown
