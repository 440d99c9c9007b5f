"""Every package, version and variable of the published set-ups' images is in ours, or there is a
reason why not: reference_images.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.dockerfiles import CONTAINER, arguments, environment


@dataclass(frozen=True)
class Line:
    """One thing that a reference image has.

    Args:
        theirs: the package, version or variable.
        file: of container/, or another one of the repository; "" where ours does not have it.
        ours: what stands in that file.
        why: why ours does not have it, or has another one.
    """

    theirs: str
    file: str = ""
    ours: str = ""
    why: str = ""


TABLE = tomllib.loads(Path(__file__).with_name("reference_images.toml").read_text())
REFERENCES = {name: [Line(**line) for line in lines] for name, lines in TABLE.items()}


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_line_is_ours_or_has_a_reason(reference: str) -> None:
    wrong = []
    for line in REFERENCES[reference]:
        if line.file and line.ours not in (CONTAINER / line.file).read_text():
            wrong.append(f"{line.theirs}: {line.file} has no {line.ours!r}")
        if not line.ours and not line.why:
            wrong.append(f"{line.theirs}: neither ours nor a reason")
    assert not wrong


@pytest.mark.parametrize("reference", REFERENCES)
def test_each_line_stands_once(reference: str) -> None:
    theirs = [line.theirs for line in REFERENCES[reference]]
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize(
    ("reference", "file"), [("nemo-aws", "Dockerfile.efa"), ("neuron", "Dockerfile.neuronx")]
)
def test_ours_sets_no_variable_that_no_reference_has(reference: str, file: str) -> None:
    """It would be our own idea of a machine that nobody here has."""
    named = " ".join(line.ours for line in REFERENCES[reference] if line.file == file)
    ours = set(environment(CONTAINER / file)) - {"TRAINKIT_IMAGE_REVISION"}
    assert {name for name in ours if name not in named} == set()


def test_versions_of_the_references_are_the_defaults() -> None:
    """A comment may name a version, too; these are what is built."""
    given = arguments(CONTAINER / "Dockerfile.efa")
    assert given["EFA_INSTALLER_VERSION"] == "1.37.0"
    assert given["AWS_OFI_NCCL_VERSION"] == "1.13.2-aws"
    assert given["GDRCOPY_VERSION"] == "2.4.1"
    assert given["NCCL_TESTS_VERSION"] == "2.13.10"
    assert environment(CONTAINER / "Dockerfile.efa")["FI_PROVIDER"] == "efa"
