"""Names of images, by the grammar of registries."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trainkit.jobs.image_reference import ImageReference, objection_to, parse_reference

SUM = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ubuntu", ImageReference("", "ubuntu")),
        ("ubuntu:22.04", ImageReference("", "ubuntu", "22.04")),
        ("nvidia/cuda:12.8.1-devel", ImageReference("", "nvidia/cuda", "12.8.1-devel")),
        (
            "nvcr.io/nvidia/pytorch:25.03-py3",
            ImageReference("nvcr.io", "nvidia/pytorch", "25.03-py3"),
        ),
        ("localhost:5000/a/b:1", ImageReference("localhost:5000", "a/b", "1")),
        ("localhost/a", ImageReference("localhost", "a")),
        ("[::1]:5000/a", ImageReference("[::1]:5000", "a")),
        (f"a@{SUM}", ImageReference("", "a", "", SUM)),
        (f"r.io/a_b/c__d-e.f:v1@{SUM}", ImageReference("r.io", "a_b/c__d-e.f", "v1", SUM)),
    ],
)
def test_parts(text: str, parts: ImageReference) -> None:
    assert parse_reference(text) == parts and str(parts) == text
    assert objection_to(text) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[HOST[:PORT]/]NAME[:TAG][@DIGEST]"),
        ("Upper/a:1", "names are in lower case"),
        ("nvcr.io#nvidia/pytorch:25.03-py3", "'#' is enroot's"),
        ("docker://ubuntu", "it has no scheme such as docker://"),
        ("a b", "NAME[:TAG]"),
        ("a:", "NAME[:TAG]"),
        ("a//b", "NAME[:TAG]"),
        ("/a", "NAME[:TAG]"),
        ("-a", "NAME[:TAG]"),
        ("a:" + "1" * 129, "NAME[:TAG]"),
        ("a@sha256:12", "NAME[:TAG]"),
        ("r_.io:x/a", "NAME[:TAG]"),
        ("a" * 256, "NAME[:TAG]"),
    ],
)
def test_what_is_none(text: str, words: str) -> None:
    assert parse_reference(text) is None
    assert words in objection_to(text)


@given(st.text(st.sampled_from("abZ09._-/:@#[] "), max_size=30))
def test_any_text(text: str) -> None:
    found = parse_reference(text)
    assert found is None or str(found) == text
