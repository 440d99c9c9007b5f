"""The guides in docs/: their TOML is what the schema takes, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli

from trainkit.jobs.schema import Job, Model, Training

DOCS = Path(__file__).resolve().parent.parent / "docs"
GUIDES = sorted(DOCS.glob("*.md"))


def tables(text: str) -> list[dict[str, dict[str, dict[str, object]]]]:
    """The documents in a guide's ```toml blocks."""
    return [tomli.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_links_between_guides(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", guide.read_text()):
        assert (DOCS / target).exists(), target


def test_the_keys_of_the_training_guide() -> None:
    found = tables((DOCS / "training.md").read_text())
    assert len(found) >= 4
    for document in found:
        for model in document.get("models", {}).values():
            Model.model_validate(model)
        for job in document.get("jobs", {}).values():
            assert set(job) <= set(Job.model_fields)
            if "training" in job:
                Training.model_validate(job["training"])


def test_every_key_in_backquotes_exists() -> None:
    """A renamed key must not live on in the guide."""
    known = {*Model.model_fields, *Training.model_fields, *Job.model_fields}
    text = re.sub(r"^```.*?^```", "", (DOCS / "training.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)\b", text)) - {"initial_scale_power"}  # GPT-NeoX's own
    assert len(words) > 20 and words <= known, words - known
