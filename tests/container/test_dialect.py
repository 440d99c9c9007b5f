"""The Dockerfiles are written so that docker's classic builder, BuildKit, podman and buildah 1.28
all take them, hold no secrets, and name what they are built on by version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.container.dockerfiles import (
    CONTAINER,
    DOCKERFILES,
    NAMES,
    arguments,
    instructions,
    last_stage,
)

ROOT = CONTAINER.parent
# what Docker's classic builder knows (Dockerfile reference, without BuildKit's additions)
CLASSIC = {"FROM", "ARG", "ENV", "RUN", "COPY", "LABEL", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
LABELS = ("title", "revision", "version", "source", "licenses")
SECRET = re.compile(r"(?i)(token|password|passwd|secret|api_?key|credential|netrc|id_rsa)")

each_file = pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)


def test_there_is_one_for_each_purpose() -> None:
    assert NAMES == [
        "Dockerfile",
        "Dockerfile.cpu",
        "Dockerfile.efa",
        "Dockerfile.megatron",
        "Dockerfile.neox",
        "Dockerfile.neuronx",
    ]


@each_file
def test_only_words_of_the_classic_builder(path: Path) -> None:
    assert {each.word for each in instructions(path)} <= CLASSIC


@each_file
def test_no_frontend_is_asked_for(path: Path) -> None:
    """`# syntax=` makes BuildKit pull an image; docker looks for directives in comments before
    the first instruction."""
    head = path.read_text().split("\nARG", 1)[0]
    assert not re.search(r"(?mi)^#\s*(syntax|escape|check)\s*=", head)


@each_file
def test_no_heredocs_and_no_options_of_buildkit(path: Path) -> None:
    for each in instructions(path):
        assert "<<" not in each.rest, each
        options = re.match(r"(--\S+\s+)*", each.rest)
        assert options is not None
        given = options.group().split()
        allowed = ("--from=",) if each.word == "COPY" else ()
        assert all(option.startswith(allowed) for option in given if allowed), each
        assert allowed or not given, each


@each_file
def test_the_base_is_a_build_argument_with_a_version(path: Path) -> None:
    found = instructions(path)
    assert found[0].word == "ARG"
    assert found[0].rest.startswith("BASE_IMAGE=")
    base = arguments(path)["BASE_IMAGE"]
    name, _, tag = base.rpartition(":")
    assert "/" in name, "a short name is looked for in another registry by each builder"
    assert re.search(r"\d", tag) and tag != "latest"
    froms = [each.rest for each in found if each.word == "FROM"]
    names = {each.split(" AS ")[1] for each in froms if " AS " in each}
    assert {each.split(" AS ")[0] for each in froms} <= {"${BASE_IMAGE}"} | names


@each_file
def test_what_is_downloaded_has_a_version(path: Path) -> None:
    for name, value in arguments(path).items():
        assert value != "latest", name
    assert ":latest" not in path.read_text()


@each_file
def test_no_secrets(path: Path) -> None:
    """Neither arguments nor variables that would hold one, nor a file that has one: both stay in
    the image's history."""
    for each in instructions(path):
        if each.word in ("ARG", "ENV", "COPY"):
            assert not SECRET.search(each.rest), each
        assert not re.search(r"://[^/\s]+@", each.rest), each


@each_file
def test_labels_and_the_commit_are_build_arguments_at_the_end(path: Path) -> None:
    """At the end, so that another commit with the same files uses every layer again."""
    found = last_stage(path)
    text = " ".join(each.rest for each in found if each.word == "LABEL")
    for label in LABELS:
        assert f"org.opencontainers.image.{label}=" in text
    names = [each.word for each in found]
    after = [each.rest for each in found[len(names) - 1 - names[::-1].index("RUN") :]]
    for argument in ("IMAGE_REVISION", "IMAGE_VERSION", "IMAGE_SOURCE"):
        assert f"{argument}=unknown" in after
    assert "TRAINKIT_IMAGE_REVISION=${IMAGE_REVISION}" in after


@each_file
def test_it_begins_with_the_entry_point_in_a_folder_for_anybody(path: Path) -> None:
    found = last_stage(path)
    rest = {each.word: each.rest for each in found}
    assert rest["ENTRYPOINT"] == '["/opt/trainkit/entrypoint.sh"]'
    assert rest["WORKDIR"] == "/workspace"
    runs = " ".join(each.rest for each in found if each.word == "RUN")
    assert "chmod 1777 /workspace" in runs or "mkdir -m 1777 /workspace" in runs
    assert "chmod -R a+rX /opt/trainkit" in runs  # whatever the checkout's umask was


@each_file
def test_what_apt_and_pip_leave_behind_is_removed_in_the_same_layer(path: Path) -> None:
    """apt is only used through apt.sh and efa.sh, which clean up; pip keeps no cache."""
    for each in instructions(path):
        if each.word != "RUN":
            continue
        assert "apt-get" not in each.rest, each
        if "pip install" in each.rest:
            assert "--no-cache-dir --no-compile" in each.rest, each


@each_file
def test_copied_files_are_there_and_in_the_context(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    back = {line[1:] for line in ignored if line.startswith("!")}
    for each in instructions(path):
        if each.word != "COPY" or each.rest.startswith("--from="):
            continue
        for source in each.rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in back, source


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_trainkits_own_code_comes_after_torch_and_packages(name: str) -> None:
    """So that a change of it installs neither again; and the compiler stays out of the image."""
    steps = [each.rest for each in instructions(CONTAINER / name) if each.word in ("RUN", "COPY")]
    order = [
        steps.index("python3 -IB /opt/build/install.py torch"),
        steps.index("python3 -IB /opt/build/install.py packages"),
        steps.index("trainkit /opt/build/trainkit"),
        steps.index("python3 -IB /opt/build/install.py trainkit"),
    ]
    assert order == sorted(order)
    copies = [each.rest for each in last_stage(CONTAINER / name) if "--from=" in each.rest]
    assert copies == [
        "--from=packages /opt/venv /opt/venv",
        "--from=trainkit /opt/prefix /opt/venv",
    ]
