"""The command lines of builders, which builder is used, and what their failures mean."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs import put_program
from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.builders import BUILDERS, candidates, choose_builder, options
from trainkit.images.contract import BuildRecipe, ImageRecord, read_record, write_record
from trainkit.images.programs import explained, step_reader
from trainkit.jobs.containers import Container

RECIPE = BuildRecipe(
    Path("/p/container/Dockerfile.efa"),
    Path("/p"),
    "111122223333.dkr.ecr.us-east-1.amazonaws.com/bignlp-training:22.09-py3-v2-efa",
    {"BASE_IMAGE": "nvcr.io/ea-bignlp/bignlp-training:22.09-py3", "EFA": "1.30.0"},
    {"org.opencontainers.image.licenses": "Apache-2.0"},
    1700000000,
)
OPTIONS = (
    f"-t {RECIPE.tag} -f /p/container/Dockerfile.efa"
    " --build-arg BASE_IMAGE=nvcr.io/ea-bignlp/bignlp-training:22.09-py3 --build-arg EFA=1.30.0"
    " --label org.opencontainers.image.licenses=Apache-2.0"
)


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose control groups are version 2 alone."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    (folder / "cgroup.controllers").touch()
    monkeypatch.setattr(options, "CGROUPS", folder)
    monkeypatch.delenv("BUILDAH_ISOLATION", raising=False)
    return folder


@pytest.mark.parametrize(
    ("builder", "version", "line"),
    [
        ("docker", "28.2.2", f"docker build /p {OPTIONS} --build-arg SOURCE_DATE_EPOCH=1700000000"),
        (
            "podman",
            "podman version 4.3.1",
            "podman build --format docker --layers --pull=never --timestamp 1700000000"
            f" {OPTIONS} /p",
        ),
        ("podman", "2.0.6", f"podman build --format docker --layers --pull=never {OPTIONS} /p"),
        (
            "buildah",
            "1.28.2",
            f"buildah bud --format oci --layers --pull-never --timestamp 1700000000 {OPTIONS} /p",
        ),
        ("buildah", "1.11.6", f"buildah bud --format oci --layers --pull-never {OPTIONS} /p"),
    ],
)
def test_build(builder: str, version: str, line: str, unified: Path) -> None:
    assert shlex.join(BUILDERS[builder].build_argv(RECIPE, version)) == line


def test_what_ocis_format_cannot_hold(unified: Path) -> None:
    argv = BUILDERS["buildah"].build_argv(replace(RECIPE, docker_format=True), "1.28.2")
    assert argv[:4] == ("buildah", "bud", "--format", "docker")


def test_a_mark_stands_among_the_arguments(unified: Path) -> None:
    for name, builder in BUILDERS.items():
        plain = builder.build_argv(RECIPE, "")
        argv = builder.build_argv(replace(RECIPE, mark="here:1:2:3"), "")
        at = argv.index("TRAINKIT_BUILD=here:1:2:3")
        assert (*argv[: at - 1], *argv[at + 1 :]) == plain and argv[at - 1] == "--build-arg"
        assert name == "docker" or argv[-1] == plain[-1], "the context is the last word"


def test_other_commands() -> None:
    lines = {
        name: [
            builder.version_argv(),
            builder.digest_argv("a:1"),
            builder.pull_argv("a:1"),
            *builder.push_argv("a:1", "r.io/a:1"),
            builder.store_argv(),
            builder.remove_argv("c1"),
        ]
        for name, builder in BUILDERS.items()
    }
    assert {name: [shlex.join(argv) for argv in each] for name, each in lines.items()} == {
        "docker": [
            "docker version --format '{{.Server.Version}}'",
            "docker image inspect --format '{{.Id}}' a:1",
            "docker pull a:1",
            "docker tag a:1 r.io/a:1",
            "docker push r.io/a:1",
            "",
            "docker rm --force c1",
        ],
        "podman": [
            "podman --version",
            "podman image inspect --format '{{.Id}}' a:1",
            "podman pull a:1",
            "podman push --format v2s2 a:1 r.io/a:1",
            "podman info --format '{{.Store.GraphDriverName}} {{.Store.GraphRoot}}'",
            "podman rm --force c1",
        ],
        "buildah": [
            "buildah --version",
            "buildah inspect --type image --format '{{.FromImageID}}' a:1",
            "buildah pull a:1",
            "buildah push --format v2s2 a:1 docker://r.io/a:1",
            "buildah info --format '{{.store.GraphDriverName}} {{.store.GraphRoot}}'",
            "buildah rm c1",
        ],
    }


def test_isolation_by_the_control_groups(unified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.isolation_options() == ()
    (unified / "cgroup.controllers").unlink()
    (unified / "unified").mkdir()
    assert options.isolation_options() == ("--isolation", "chroot")
    monkeypatch.setenv("BUILDAH_ISOLATION", "oci")  # said by the caller
    assert options.isolation_options() == ()


def container(runtime: str, **more: object) -> Container:
    values = {"name": "c", "dockerfile": "/p/Dockerfile", "runtime": runtime, **more}
    return Container.model_validate(values)


def test_which_builders_a_runtime_sees() -> None:
    def names(each: Container) -> list[str]:
        return [builder.name for builder in candidates(each)]

    assert names(container("docker")) == ["docker"]
    assert names(container("podman")) == ["podman", "buildah"]
    assert names(container("pyxis")) == ["docker", "podman", "buildah"]
    assert names(container("docker", registry="r.io/a")) == ["docker", "podman", "buildah"]
    with pytest.raises(TrainkitError) as refused:
        choose_builder("buildah", container("docker"))
    assert "runtime = 'docker' does not see what buildah builds" in str(refused.value)


def programs(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        put_program(folder, name, "#!/bin/sh\nexit 1\n")
    return folder


def test_the_first_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(TrainkitError) as refused:
        choose_builder(None, container("pyxis"))
    assert refused.value.exit == Exit.STAGE_FAILED
    assert "no builder is here; docker is not in PATH; podman is not in PATH" in str(refused.value)
    programs(tmp_path / "bin", "docker", "buildah")
    if not Path("/var/run/docker.sock").exists():
        chosen = choose_builder(None, container("pyxis"))[1]  # a client alone builds nothing
        assert chosen == "buildah, the first here of docker, podman, buildah"
        with pytest.raises(TrainkitError) as refused:
            choose_builder("docker", container("pyxis"))
        assert "docker has no daemon here: no socket" in str(refused.value)
    monkeypatch.setenv("DOCKER_HOST", "unix:///tmp/docker.sock")
    assert choose_builder(None, container("pyxis"))[0].name == "docker"
    with pytest.raises(TrainkitError) as refused:
        choose_builder("podman", container("pyxis"))
    assert "builder 'podman' is not here: podman is not in PATH" in str(refused.value)


# as the programs said it (docker 20.10 and 28.2, podman 4.3, buildah 1.28), and what that is
SAID = {
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon"
    " running?": "daemon does not answer",
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run"
    "/docker.sock: dial unix /var/run/docker.sock: connect: permission denied": "you may not talk",
    "Error: creating build container: writing blob: no space left on device": "the disk is full",
    "Error: initializing source docker://nvcr.io/x:1: reading manifest 1 in nvcr.io/x:"
    " unauthorized: authentication required": "wants to know who asks",
    "Error: initializing source docker://quay.io/x:1: reading manifest 1 in quay.io/x: manifest"
    " unknown: manifest unknown": "has no such image",
    "Error: initializing source docker://nowhere.invalid/x:1: pinging container registry"
    " nowhere.invalid: Get https://nowhere.invalid/v2/: dial tcp: lookup nowhere.invalid: no such"
    " host": "cannot be reached",
    "Error: building at STEP RUN true: crun: cgroups in hybrid mode not supported, drop all"
    " controllers from cgroupv2": "cannot start a step on this kernel",
    'Error response from daemon: dockerfile parse error line 3: unknown instruction: "ECHO"': (
        "does not know"
    ),
    "Error: error while creating user namespace: newuidmap: write to uid_map failed": (
        "may not make user namespaces"
    ),
    "Error: mount /proc: operation not permitted": "lacks rights",
}


@pytest.mark.parametrize(("said", "meaning"), SAID.items())
@pytest.mark.parametrize("builder", BUILDERS)
def test_failures_are_explained(said: str, meaning: str, builder: str) -> None:
    lines = ["STEP 3/4: RUN true", said, "exit status 125"]
    error = explained((builder, "build", "x"), 125, lines, ())
    assert error.exit == Exit.STAGE_FAILED and meaning in error.message and error.hint
    assert said in error.message, "the program's own words are shown"


def test_a_failed_step_keeps_its_own_words() -> None:
    lines = ["STEP 3/4: RUN make", "make: *** [all] Error 1", "exit status 2"]
    error = explained(("buildah", "bud"), 2, lines, ())
    assert error.message == "`buildah bud` exited with 2: exit status 2"
    assert "make: *** [all] Error 1" in error.hint


@pytest.mark.parametrize(
    "end",
    [
        'Error: building at STEP "RUN make": exit status 2',
        'Error: building at STEP "RUN make": while running runtime: exit status 2',
        "The command '/bin/sh -c make' returned a non-zero code: 2",
        'ERROR: failed to solve: process "/bin/sh -c make" did not complete successfully: exit code'
        ": 2",
    ],
)
@pytest.mark.parametrize(
    "said",
    ["a.c:403: error", "PermissionError: [Errno 13] Permission denied: '/x'", "Connection refused"],
)
def test_what_a_step_prints_is_no_registrys_answer(said: str, end: str) -> None:
    error = explained(("buildah", "bud"), 2, ["STEP 3/4: RUN make", said, end], ())
    assert error.message == f"`buildah bud` exited with 2: {end}" and said in error.hint
    full = explained(("buildah", "bud"), 2, ["cc1: No space left on device", end], ())
    assert "the disk is full" in full.message


def test_a_folder_that_may_not_be_read_is_no_registrys_answer() -> None:
    error = explained(("mksquashfs",), 1, ["open /x: Permission denied: /x", "line 403"], ())
    assert "lacks rights" in error.message


@pytest.mark.parametrize(
    "lines",
    [
        ["STEP 1/4: FROM a", "STEP 2/4: RUN b", "--> Using cache", "STEP 4/4: LABEL c"],
        ["Step 1/4 : FROM a", "Step 2/4 : RUN b", " ---> 1234", "Step 4/4 : LABEL c"],
        ["#5 [1/4] FROM a", "#6 [2/4] RUN b", "#6 CACHED", "#8 [4/4] RUN c", "#9 exporting"],
        ["[1/2] STEP 1/4: FROM a", "[1/2] STEP 2/4: RUN b", "[2/2] STEP 4/4: RUN c"],
    ],
)
def test_steps_are_counted(lines: list[str]) -> None:
    seen: list[tuple[int, int]] = []
    read = step_reader(lambda done, of: seen.append((done, of)))
    for line in lines:
        read(line)
    assert seen == [(1, 4), (3, 4)]


def test_a_record_goes_there_and_back(tmp_path: Path) -> None:
    record = ImageRecord("a", "trainkit-a", "sha256:1", size=3, options={"compression": "zstd"})
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json") == record
    for text in ("", "[]", '{"schema": "image/1"}', '{"schema": "other/1"}'):
        (tmp_path / "a.json").write_text(text)
        assert read_record(tmp_path / "a.json") is None
    assert read_record(tmp_path / "none.json") is None
