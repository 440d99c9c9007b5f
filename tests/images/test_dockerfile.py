"""What a Dockerfile reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trainkit.base.errors import ConfigError, Exit
from trainkit.images.dockerfile import CopiedFiles, Dockerfile, fill_in, read_dockerfile

WHOLE = r"""# escape=\
# comment
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.03-py3
ARG TOOLS
FROM --platform=linux/amd64 ${BASE_IMAGE} AS build
ARG TOOLS
ENV WHERE=src EMPTY=
RUN apt-get update && \
    # a comment within it
    apt-get install -y gcc \

    g++
COPY --chown=1:1 ${WHERE}/a.py "$WHERE/b.py" /x/
copy ["with blank.txt", "/x/"]
ADD https://example.org/a.tar.gz local.tar /y/
RUN --mount=type=bind,source=wheels,target=/w --mount=type=cache,target=/c pip install /w/*
FROM build
COPY --from=build /x /x
COPY --from=quay.io/tools:${TOOLS:-1} /t /t
COPY --exclude=*.md $UNKNOWN /z
RUN <<EOF cat
COPY nothing /nowhere
EOF
FROM scratch AS last
COPY --from=0 /x /x
ONBUILD COPY later /x
"""


def parsed(text: str, folder: Path, **arguments: str) -> Dockerfile:
    path = folder / "Dockerfile"
    path.write_text(text)
    return read_dockerfile(path, arguments)


def test_all_that_it_reads(tmp_path: Path) -> None:
    found = parsed(WHOLE, tmp_path)
    assert found.bases == ("nvcr.io/nvidia/pytorch:25.03-py3", "quay.io/tools:1")
    assert found.arguments == {"BASE_IMAGE", "TOOLS"}
    assert found.copied == (
        CopiedFiles(("src/a.py", "src/b.py"), (), 13),
        CopiedFiles(("with blank.txt",), (), 14),
        CopiedFiles(("local.tar",), (), 15),
        CopiedFiles(("wheels",), (), 16),
        CopiedFiles((".",), ("*.md",), 20),  # of the base image's environment: it may be anything
    )


def test_arguments_go_before_defaults(tmp_path: Path) -> None:
    found = parsed(WHOLE, tmp_path, BASE_IMAGE="localhost/base:2", TOOLS="7")
    assert found.bases == ("localhost/base:2", "quay.io/tools:7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Dockerfile: the Dockerfile has no FROM"),
        ("# only this\nARG A=1\n", "the Dockerfile has no FROM"),
        ("RUN true\nFROM a\n", "Dockerfile:1: RUN stands before the first FROM"),
        ("FROM a b\n", "Dockerfile:1: FROM takes IMAGE [AS NAME]"),
        (
            "ARG BASE_IMAGE\nFROM $BASE_IMAGE\n",
            "Dockerfile:2: FROM $BASE_IMAGE: nothing gives BASE_IMAGE a value\n"
            "  give it in containers.X.base, or a default: ARG BASE_IMAGE=...",
        ),
        ('ARG A=""\nFROM $A\n', "Dockerfile:2: FROM $A names no image: it is empty"),
        ("FROM a\n\nCOPY b\n", "Dockerfile:3: COPY takes SOURCE... DESTINATION"),
        ("FROM a\nRUN <<EOF\ntrue\n", "Dockerfile:2: the heredoc <<EOF does not end"),
        ("FROM a\n@RUN b\n", "Dockerfile:2: '@RUN' is not an instruction"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(text, tmp_path)
    assert words in str(refused.value) and refused.value.exit == Exit.STAGE_FAILED


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$A/x", "1/x"),
        ("${A}b", "1b"),
        (r"\$A", "$A"),
        ("${B:-two}", "two"),
        ("${B-two}", ""),
        ("${C-$A}", "1"),
        ("${A:+there}", "there"),
        ("${C:+there}", ""),
    ],
)
def test_variables(text: str, filled: str) -> None:
    assert fill_in(text, {"A": "1", "B": ""}) == filled


NAMES = st.text("abcXYZ019._-/", min_size=1, max_size=12).filter(lambda name: name[0] not in "-./")
BLANKS = st.sampled_from([" ", "  ", "\t", " \\\n  ", " \\\n# comment\n\t", " \\ \n\n "])


@given(
    copies=st.lists(st.lists(NAMES, min_size=1, max_size=4), min_size=1, max_size=6),
    verbs=st.lists(st.sampled_from(["COPY", "copy", "ADD", "Add"]), min_size=6, max_size=6),
    blanks=st.lists(BLANKS, min_size=6, max_size=6),
    between=st.lists(
        st.sampled_from(["", "# COPY a b", "RUN a \\\n COPY b c", "RUN <<E\nCOPY d e\nE"]),
        min_size=6,
        max_size=6,
    ),
)
def test_copies_are_found_however_they_are_written(
    copies: list[list[str]],
    verbs: list[str],
    blanks: list[str],
    between: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    lines = ["FROM scratch"]
    for number, sources in enumerate(copies):
        blank = blanks[number]
        lines.append(between[number])
        lines.append(verbs[number] + blank + blank.join([*sources, "/to/"]))
    found = parsed("\n".join(lines), tmp_path_factory.mktemp("dockerfile"))
    assert [list(each.sources) for each in found.copied] == copies


@given(text=st.text(st.sampled_from("FROM COPY ADDab$\\{}\"'[]<-:=#\n\t"), max_size=60))
def test_any_text_is_read_or_refused(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        parsed("FROM scratch\n" + text, tmp_path_factory.mktemp("dockerfile"))
    except ConfigError as refused:
        assert refused.list[0].place is not None
