"""The documentation as files and as a website: links and anchors lead somewhere, the navigation has
every page, and mkdocs builds it without a warning."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

import pytest

from tests.conftest import Project

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """Without blocks and spans of code, whose brackets are not links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", lambda span: "`" + "x" * (len(span.group()) - 2) + "`", text)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and mkdocs.yml's slugify make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_anchors(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}: no such heading"


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = ["index.md", "contributing.md", *(path.name for path in (ROOT / "docs").glob("*.md"))]
    assert sorted(listed) == sorted(pages)


def test_pictures_have_a_text_and_say_what_the_files_hold() -> None:
    """A picture's file is of the tools that docs/pictures.py names, without another server's."""
    for name in ("plan", "resume", "demo", "stages", "curation"):
        picture = (ROOT / f"docs/{name}.svg").read_text()
        assert "<svg" in picture and "url(http" not in picture and "@import" not in picture
    shown = html.unescape((ROOT / "docs/plan.svg").read_text()).replace("\xa0", " ")
    assert "gpt-neox-20b-lambda" in shown and "feasible" in shown
    words = r'<text class="plan-r\d+" x="([\d.]+)" y="[\d.]+" textLength="([\d.]+)"[^>]*>(.*\S)</'
    columns = [(float(x) + float(length)) / 12.2 for x, length, _ in re.findall(words, shown)]
    assert 0 < round(max(columns)) <= 76, "wider, it cannot be read on a phone"
    for page in PAGES:
        assert "![](" not in page.read_text(), f"a picture of {page.name} has no text"


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra docs")
def test_the_website_is_built(project: Project, tmp_path: Path) -> None:
    """Strictly: mkdocs warns of nothing."""
    done = project.invoke("docs", "--output", str(tmp_path / "site"))
    assert done.stdout == f"wrote {tmp_path}/site/index.html\n"
    pages = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"index.html", "quickstart", "contributing", "plan.svg", "jobs.schema.json"} <= pages
    first = (tmp_path / "site/index.html").read_text()
    assert 'href="quickstart/"' in first and 'src="plan.svg"' in first


@pytest.mark.skipif(importlib.util.find_spec("material") is not None, reason="the extra is there")
def test_without_the_extra_the_way_out_is_named(project: Project) -> None:
    said = project.invoke("docs", exit=3).stderr
    assert "needs mkdocs-material" in said and "[docs]" in said
