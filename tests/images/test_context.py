"""Which files of a context go into an image; the same as buildah takes."""

from __future__ import annotations

import os
import posixpath
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.images.scratch_store import scratch_store
from trainkit.base.errors import ConfigError
from trainkit.images.context import ContextFiles, context_files, ignore_file, read_ignore
from trainkit.images.dockerfile import read_dockerfile

TREE = (
    "README.md",
    "a.py",
    "a.pyc",
    "docs/README.md",
    "docs/guide.md",
    "docs/pictures/one.png",
    "src/a.py",
    "src/deep/b.py",
    "src/deep/b.pyc",
    "src/deep/keep.pyc",
    ".git/HEAD",
    "x[1].txt",
    "tmp1",
    "tmp22",
)
RULES = (  # the examples of docs.docker.com/build/concepts/context, ".dockerignore files", and more
    "# comment\n*/temp*\n*/*/temp*\ntemp?\n",
    "*.md\n!README.md\n",
    "*.md\n!README*.md\nREADME.md\n",
    "**/*.pyc\n!**/keep.pyc\n.git\n",
    "*\n!src\n!docs/guide.md\n",
    "/docs/\nsrc/../a.py\n",
    "docs\n!docs/pictures\n",
    "tmp?\n[a-b].py\n",
)


def tree(folder: Path) -> Path:
    for name in TREE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def taken(context: Path, dockerfile: str, rules: str = "") -> ContextFiles:
    (context / ".dockerignore").write_text(rules)
    path = context.parent / "Dockerfile"
    path.write_text(dockerfile)
    ignore = read_ignore(ignore_file(path, context, "docker"))
    return context_files(context, ignore, read_dockerfile(path, {}).copied, path)


def names(found: ContextFiles, context: Path) -> set[str]:
    return {str(path.relative_to(context)) for path in found.files} | set(found.links)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return scratch_store(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("rules", RULES)
def test_the_same_files_as_buildah_takes(rules: str, store: dict[str, str], tmp_path: Path) -> None:
    context = tree(tmp_path / "context")
    ours = names(taken(context, "FROM scratch\nCOPY . /\n", rules), context)
    argv = ["buildah", "bud", "--isolation", "chroot", "--layers=false", "--quiet"]
    argv += ["-f", str(tmp_path / "Dockerfile"), str(context)]
    image = run(argv, store)
    container = run(["buildah", "from", "--pull-never", image], store)
    root = Path(run(["buildah", "mount", container], store))
    theirs = {
        str((Path(folder) / name).relative_to(root))
        for folder, _, files in os.walk(root)
        for name in files
    }
    run(["buildah", "rm", container], store)
    run(["buildah", "rmi", image], store)
    assert ours == theirs


def run(argv: list[str], store: dict[str, str]) -> str:
    done = subprocess.run(
        argv, env={**os.environ, **store}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


@pytest.mark.parametrize(
    ("dockerfile", "found"),
    [
        ("COPY a.py docs/pictures /x/", {"a.py", "docs/pictures/one.png"}),
        ("COPY *.py* /x/", {"a.py", "a.pyc"}),
        ("COPY */*.md ./src/../a.py /x/", {"docs/README.md", "docs/guide.md", "a.py"}),
        ("COPY src/* /x/", {"src/a.py", "src/deep/b.py", "src/deep/b.pyc", "src/deep/keep.pyc"}),
        ("COPY --exclude=*/*.pyc src/deep /x/", {"src/deep/b.py", "src/deep/b.pyc"} - {0}),
        ("COPY none* a.py /x/", {"a.py"}),
        ("RUN --mount=type=bind,source=docs,target=/d true", set(TREE[3:6])),
        ("RUN true", set()),
    ],
)
def test_sources(dockerfile: str, found: set[str], tmp_path: Path) -> None:
    context = tree(tmp_path / "context")
    if "--exclude" in dockerfile:
        found = {"src/deep/b.py", "src/deep/b.pyc", "src/deep/keep.pyc"}  # * crosses no folder
    assert names(taken(context, f"FROM scratch\n{dockerfile}\n"), context) == found


@pytest.mark.parametrize(
    ("dockerfile", "rules", "words"),
    [
        ("COPY gone.py /x", "", "Dockerfile:2: gone.py is not in the context"),
        ("COPY ../a /x", "", "Dockerfile:2: ../a is outside of the context"),
        ("COPY a.py /x", "*.py\n", "a.py is left out of the context by its ignore file"),
        ("COPY a.py /x", "a\n[b\n", ".dockerignore:2: '[b' is not a pattern"),
    ],
)
def test_what_is_not_there(dockerfile: str, rules: str, words: str, tmp_path: Path) -> None:
    context = tree(tmp_path / "context")
    with pytest.raises(ConfigError) as refused:
        taken(context, f"FROM scratch\n{dockerfile}\n", rules)
    assert words in str(refused.value)


def test_links_and_modes(tmp_path: Path) -> None:
    context = tree(tmp_path / "context")
    (context / "src" / "run").symlink_to("../a.py")
    (context / "a.py").chmod(0o755)
    (context / "to-docs").symlink_to("docs/pictures")
    found = taken(context, "FROM scratch\nCOPY src a.py to-docs /x/\n")
    assert found.links == {"src/run": "../a.py", "to-docs": "docs/pictures"}
    assert found.modes == {"a.py": "755"}
    assert context / "docs/pictures/one.png" in found.files


def test_which_ignore_file_counts(tmp_path: Path) -> None:
    dockerfile = tmp_path / "image.Dockerfile"
    context = tmp_path / "context"
    context.mkdir()
    assert ignore_file(dockerfile, context, "docker") is None
    (context / ".dockerignore").touch()
    (context / ".containerignore").touch()
    assert ignore_file(dockerfile, context, "docker") == context / ".dockerignore"
    assert ignore_file(dockerfile, context, "buildah") == context / ".containerignore"


PARTS = st.sampled_from(["a", "b", "c.py", "d.md"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
PATTERNS = st.lists(
    st.sampled_from(["a", "b", "*.py", "*", "**", "?", "d.md", "c.*"]), min_size=1, max_size=3
).map("/".join)


@given(path=PATHS, rules=st.lists(st.tuples(st.booleans(), PATTERNS), max_size=4))
def test_rules_by_their_definition(
    path: str, rules: list[tuple[bool, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The last rule that matches the path, or a folder above it, counts. A folder that cannot
    hold anything that is taken again is not looked into."""
    file = tmp_path_factory.mktemp("rules") / ".dockerignore"
    file.write_text("".join(f"{'!' if again else ''}{rule}\n" for again, rule in rules))
    found = read_ignore(file)
    parts = path.split("/")
    above = ["/".join(parts[: at + 1]) for at in range(len(parts))]
    said = [again for again, rule in rules if any(matches(rule, each) for each in above)]
    assert found.ignores(path) == bool(said and not said[-1])
    folders = above[:-1]
    if not found.ignores(path):
        assert all(not found.ignores(each) or found.may_hold_more(each) for each in folders)


def matches(rule: str, path: str) -> bool:
    """A pattern by its parts: ** stands for any number of them."""

    def of(left: list[str], right: list[str]) -> bool:
        if not left:
            return not right
        if left[0] == "**" and len(left) == 1:
            return bool(right)  # a/** is what lies in a, not a itself
        if left[0] == "**":
            return any(of(left[1:], right[at:]) for at in range(len(right) + 1))
        return bool(right) and part(left[0], right[0]) and of(left[1:], right[1:])

    return of(posixpath.normpath(rule).split("/"), path.split("/"))


def part(rule: str, text: str) -> bool:
    if rule == "*":
        return True
    if rule == "?":
        return len(text) == 1
    if rule.startswith("*"):
        return text.endswith(rule[1:])
    if rule.endswith("*"):
        return text.startswith(rule[:-1])
    return rule == text
