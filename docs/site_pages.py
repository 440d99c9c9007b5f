"""A hook of mkdocs (mkdocs.yml): README.md and CONTRIBUTING.md become pages of the website.

Links between files of the repository become links between pages. The files themselves stay as
they are.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def page_text(text: str, source: str) -> str:
    """The text with its links changed: to other pages, or, for a file that is none, to its path.

    Args:
        text: Markdown.
        source: where it stands in the repository, such as docs/data.md.
    """

    def change(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in target:
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in PAGES:
            return f"[{label}]({PAGES[path]}{mark}{anchor})"
        if path.startswith("docs/"):
            return f"{picture}[{label}]({path.removeprefix('docs/')}{mark}{anchor})"
        return f"{label} (`{path}`)"

    return LINK.sub(change, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        text = page_text((ROOT / source).read_text(), source)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page of docs/."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return page_text(markdown, f"docs/{page.file.src_uri}")
