"""Requirement lines and versions, beside the library `packaging`, which images may not have."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trainkit.engines.rank.versions import allows, bounded_package
from trainkit.engines.requirements import KNOWN, known_lines

RELEASES = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(
    lambda parts: ".".join(map(str, parts))
)
OPERATORS = st.sampled_from(["==", "!=", ">=", "<=", "<", ">"])
BOUNDS = st.lists(st.tuples(OPERATORS, RELEASES), min_size=1, max_size=3)


@given(BOUNDS, RELEASES)
def test_bounds_mean_what_packaging_says(bounds: list[tuple[str, str]], version: str) -> None:
    text = ",".join(operator + release for operator, release in bounds)
    assert allows(f"name{text}", version) == (Version(version) in SpecifierSet(text))


@given(st.sampled_from(["==", "!="]), RELEASES, RELEASES)
def test_a_wildcard_means_what_packaging_says(operator: str, bound: str, version: str) -> None:
    text = f"{operator}{bound}.*"
    padded = f"{version}.0.0.0.0"  # 1 is 1.0: the library adds what is missing
    assert allows(f"name{text}", padded) == (Version(padded) in SpecifierSet(text))


@given(RELEASES.filter(lambda text: "." in text), RELEASES)
def test_a_compatible_release_means_what_packaging_says(bound: str, version: str) -> None:
    padded = f"{version}.0.0.0.0"
    assert allows(f"name~={bound}", padded) == (Version(padded) in SpecifierSet(f"~={bound}"))


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("transformers==4.38.0", "transformers"),
        ("packaging >= 24.2", "packaging"),
        ("torch==2.7.*", "torch"),
        ("x[extra]<2", "x"),
        ("torch", None),
        ("-r more.txt", None),
        ("./folder", None),
        ("deepspeed @ git+https://example.org/d.git@1.0", None),
    ],
)
def test_lines_that_bound_a_version(line: str, package: str | None) -> None:
    assert bounded_package(line) == package


def test_local_versions_and_words_are_not_compared() -> None:
    assert allows("torch==2.13.0", "2.13.0+cpu")
    assert allows("torch==2.13.0", "unknown")
    assert not allows("torch==2.7.*", "2.13.0+cpu")


def test_every_known_line_can_be_read() -> None:
    assert KNOWN.is_file()
    named = [bounded_package(line) for line in known_lines("gpt-neox", "2.0.0")]
    assert {"transformers", "numpy", "setuptools"} <= set(named)
