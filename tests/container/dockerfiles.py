"""The Dockerfiles of container/ as instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CONTAINER = Path(__file__).resolve().parents[2] / "container"
DOCKERFILES = sorted(CONTAINER.glob("Dockerfile*"))
NAMES = [path.name for path in DOCKERFILES]


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines joined, without comments.

    Args:
        word: upper case.
        rest: what follows the word.
        stage: which FROM it follows, counted from 0; -1 before the first.
    """

    word: str
    rest: str
    stage: int


def instructions(path: Path) -> list[Instruction]:
    """Those of one file. Comment lines end nothing, also within a continued instruction."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found = []
    stage = -1
    for text in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if not text.strip():
            continue
        word, _, rest = text.strip().partition(" ")
        stage += word.upper() == "FROM"
        found.append(Instruction(word.upper(), " ".join(rest.split()), stage))
    return found


def last_stage(path: Path) -> list[Instruction]:
    """Those that make the image itself."""
    found = instructions(path)
    return [each for each in found if each.stage == found[-1].stage]


def environment(path: Path) -> dict[str, str]:
    """What ENV of the last stage sets, words as they stand there."""
    pairs = [
        pair.partition("=")
        for each in last_stage(path)
        if each.word == "ENV"
        for pair in each.rest.split()
    ]
    return {name: value for name, _, value in pairs}


def arguments(path: Path) -> dict[str, str]:
    """What ARG declares, with its default."""
    pairs = [each.rest.partition("=") for each in instructions(path) if each.word == "ARG"]
    return {name: value.strip('"') for name, _, value in pairs}
