"""The stage build-container and its task, with a real buildah: what makes an image stale, and
what is left when a build fails or is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, alive, wait_for
from tests.images.scratch_store import scratch_store
from tests.mounts import unmount

JOBS = """
[clusters.here]
ranks_per_node = 1

[containers.app]
dockerfile = "image/Dockerfile"
runtime = "podman"
builder = "buildah"

[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128

[jobs.small]
cluster = "here"
container = "app"
model = "tiny"
dataset = "mock"
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 3
training.lr = 1e-2
"""
DOCKERFILE = """
ARG BASE_IMAGE=scratch
FROM ${BASE_IMAGE}
ARG GREETING=hello
COPY src /src
COPY one.txt /
LABEL greeting=$GREETING
"""
# what a step needs of a root file system: this machine's /usr is mounted there
LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name, value in scratch_store(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    found = Project(tmp_path / "project")
    for name in ("image", "src/deep"):
        (found.path / name).mkdir(parents=True)
    (found.path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    (found.path / "jobs.toml").write_text(JOBS)
    (found.path / "image/Dockerfile").write_text(DOCKERFILE)
    (found.path / "one.txt").write_text("1")
    (found.path / "src/a.py").write_text("a")
    (found.path / "src/deep/b.py").write_text("b")
    return found


def edit(project: Project, name: str, old: str, new: str) -> None:
    path = project.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def buildah(*words: str) -> str:
    argv = ["buildah", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def built(project: Project, *words: str) -> dict[str, Any]:
    """The document of `build-container small`, with its one verdict as "because"."""
    found = project.document("build-container", "small", *words)
    (verdict,) = found["stages"]
    return {**found, **verdict}


def test_built_once_and_fresh_after(project: Project) -> None:
    dry = project.invoke("build-container", "small", "--dry-run").stdout
    where = project.path
    assert (
        "    buildah bud --format oci --layers --pull-never --timestamp 315532800"
        f" -t trainkit-app -f {where}/image/Dockerfile {where}\n"
    ) in dry
    assert not (where / "stamps").exists() and not (where / "images").exists()
    first = built(project)
    assert first["because"] == "it was never made here"
    image = first["image"]
    inside = buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", "trainkit-app")
    assert image["digest"] == f"sha256:{inside}" and image["builder"] == "buildah"
    log = (where / "stamps/build-container/app.units/build.log").read_text()
    assert "builder: buildah, as named, version" in log and "COPY one.txt /" in log
    second = built(project)
    assert second["fresh"] and second["because"].startswith("nothing changed since ")
    again = built(project, "--force")
    assert again["because"] == "--force was given"
    assert again["image"]["digest"] == image["digest"], "nothing changed"


def test_the_same_input_gives_the_same_digest(project: Project) -> None:
    """Also without what the first build left, and with other times of the files."""
    first = built(project)["image"]["digest"]
    buildah("rmi", "--all", "--force")
    for name in ("one.txt", "src/a.py"):
        os.utime(project.path / name, (1, 1))
    second = built(project)
    assert second["because"] == "trainkit-app is not in buildah's store any more"
    assert second["image"]["digest"] == first


CHANGES: dict[str, tuple[Callable[[Project], object], str]] = {
    "a file that is copied": (
        lambda p: (p.path / "src/deep/b.py").write_text("c"),
        "input {}/src/deep/b.py changed",
    ),
    "one more": (lambda p: (p.path / "src/c.py").touch(), "input {}/src/c.py is new"),
    "one less": (lambda p: (p.path / "src/a.py").unlink(), "input {}/src/a.py is gone"),
    "its mode": (
        lambda p: (p.path / "one.txt").chmod(0o755),
        'mode of one.txt changed from nothing to "755"',
    ),
    "a link": (
        lambda p: (p.path / "src/l").symlink_to("a.py"),
        'link src/l changed from nothing to "a.py"',
    ),
    "the Dockerfile": (
        lambda p: edit(p, "image/Dockerfile", "LABEL", "LABEL more=1\nLABEL"),
        "input {}/image/Dockerfile changed",
    ),
    "an ignore file": (
        lambda p: (p.path / ".dockerignore").write_text("src/deep\n"),
        "input {}/.dockerignore is new, input {}/src/deep/b.py is gone",
    ),
    "an argument": (
        lambda p: edit(p, "jobs.toml", "[models", 'build_args = { GREETING = "hi" }\n[models'),
        'build argument GREETING changed from nothing to "hi"',
    ),
    "somebody else's image": (
        lambda p: buildah("tag", "localhost/base:1", "trainkit-app"),
        "trainkit-app in buildah's store is {base} now, and {built} was built",
    ),
    "another base of the same name": (
        lambda p: base(p, "2"),
        "base localhost/base:1 changed from {base} to {now}",
    ),
    "the tag": (
        lambda p: edit(p, "jobs.toml", "[models", 'tag = "other:1"\n[models'),
        'tag changed from "trainkit-app" to "other:1"',
    ),
}
NO_CHANGES: dict[str, Callable[[Project], object]] = {
    "a file that is not copied": lambda p: (p.path / "README.md").touch(),
    "the time of a file": lambda p: os.utime(p.path / "one.txt", (1, 1)),
    "a comment elsewhere": lambda p: edit(p, "jobs.toml", "[models", "# more\n[models"),
}


def base(project: Project, text: str) -> str:
    """The id of localhost/base:1, which is made of this text."""
    folder = project.path / "base"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(f"FROM scratch\nLABEL text={text}\n")
    buildah("bud", "-q", "-t", "localhost/base:1", str(folder))
    words = ("inspect", "--type", "image", "--format", "{{.FromImageID}}", "localhost/base:1")
    return buildah(*words)


def test_what_changes_makes_it_stale_because_of_that(project: Project) -> None:
    """One after another, each on an image that is fresh but for it."""
    before = base(project, "1")
    more = 'runtime = "podman"\nbase = "localhost/base:1"'
    edit(project, "jobs.toml", 'runtime = "podman"', more)
    after = built(project)
    for name, (change, because) in CHANGES.items():
        digest = str(after["image"]["digest"])
        change(project)
        words = ("inspect", "--type", "image", "--format", "{{.FromImageID}}", "localhost/base:1")
        now = buildah(*words)
        after = built(project)
        wanted = because.replace("{}", str(project.path)).format(
            base=before[:12], built=digest.removeprefix("sha256:")[:12], now=now[:12]
        )
        assert after["because"] == wanted, name
        if name == "a file that is copied":
            assert after["image"]["digest"] != digest
    for name, change in NO_CHANGES.items():
        change(project)
        assert built(project)["fresh"], name


def refused(project: Project, *words: str, exit: int = 6) -> str:
    return project.invoke("build-container", "small", *words, exit=exit).stderr


def test_bad_input(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = (project.path / "jobs.toml").read_text()

    def table(*lines: str, runtime: str = "podman") -> None:
        start = toml.replace('"podman"', f'"{runtime}"')
        text = start.replace('builder = "buildah"\n', "".join(f"{line}\n" for line in lines))
        (project.path / "jobs.toml").write_text(text)

    table('tag = "Upper/Case"')
    said = refused(project, exit=3)
    assert "jobs.toml:8: containers.app: tag = 'Upper/Case' is not an image reference" in said
    assert "names are in lower case" in said
    table('base = "nvcr.io#nvidia/pytorch:25.03-py3"')
    assert "'#' is enroot's; a registry ends with '/' here" in refused(project, exit=3)
    table('source = "docker://a"')
    assert "source and dockerfile exclude each other" in refused(project, exit=3)
    table('build_args = { OTHER = "1" }')
    assert "containers.app.build_args.OTHER changes nothing" in refused(project)
    table('build_args = { GREETING = "https://me:secret@index.example/simple" }')
    said = refused(project)
    assert "https://***@index.example/simple' holds a user or password" in said
    assert "secret" not in said
    table('context = "nowhere"')
    assert f"containers.app.context = '{project.path}/nowhere' is not a folder" in refused(project)
    table()
    assert "builders are docker, podman, buildah" in refused(project, "--builder", "kaniko", exit=3)
    assert "runtime = 'podman' does not see what docker builds" in (
        refused(project, "--builder", "docker")
    )
    assert "--push: containers.app names no registry" in refused(project, "--push", exit=3)
    (project.path / "image/Dockerfile").rename(project.path / "image/Other")
    assert f"cannot read the Dockerfile {project.path}/image/Dockerfile: No such file" in (
        refused(project)
    )
    (project.path / "jobs.toml").write_text(toml.replace('container = "app"\n', ""))
    assert "jobs.small has no container, so there is no image to build" in refused(project, exit=3)
    (project.path / "image/Other").rename(project.path / "image/Dockerfile")
    (project.path / "jobs.toml").write_text(toml)
    path = project.path / "empty"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    assert "builder 'buildah' is not here: buildah is not in PATH" in refused(project)


def test_a_base_that_cannot_be_pulled(project: Project) -> None:
    edit(project, "jobs.toml", "[models", 'base = "localhost:1/none:1"\n[models')
    said = refused(project)
    assert "`buildah pull` exited with" in said and "cannot be reached from here" in said
    assert "localhost:1/none:1" in said
    edit(project, "jobs.toml", 'base = "localhost:1/none:1"\n', "")
    assert "its last making failed" in built(project)["because"]


LONG = f"9{os.getpid():07d}"  # seconds, by which the step is known among other suites' too


def long_step(project: Project) -> None:
    """A step that ends when it is killed."""
    links = project.path / "root"
    links.mkdir()
    for name, target in LINKS.items():
        (links / name).symlink_to(target)
    (project.path / "image/Dockerfile").write_text(
        f"FROM scratch\nCOPY root /\nRUN echo it has begun; exec sleep {LONG}\n"
    )


def sleepers() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", LONG.encode()]:
            found.append(int(folder.name))
    return found


def begun(project: Project) -> bool:
    log = project.path / "stamps/build-container/app.units/build.log"
    return log.exists() and "\nit has begun" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle(project: Project, number: signal.Signals) -> None:
    """No process is left, nothing looks fresh, and the next build goes on."""
    built(project)
    dockerfile = (project.path / "image/Dockerfile").read_text()
    long_step(project)
    child = project.start("build-container", "small")
    wait_for(lambda: begun(project), "the long step")
    (sleeper,) = wait_for(sleepers, "its program")
    os.kill(child.pid, number)
    child.communicate()
    wait_for(lambda: not alive(sleeper), "the end of the step")
    (project.path / "image/Dockerfile").write_text(dockerfile)
    because = built(project)["because"]
    assert because.startswith("its making was interrupted (then it was stale because ")
    assert built(project)["fresh"]


def test_the_format_that_a_shell_needs(project: Project) -> None:
    """Of the Dockerfile, or of the base: OCI's format would lose it."""
    folder = project.path / "base"
    folder.mkdir()
    (folder / "Dockerfile").write_text('FROM scratch\nSHELL ["/bin/bash", "-c"]\n')
    buildah("bud", "-q", "--format", "docker", "-t", "localhost/base:1", str(folder))
    edit(project, "jobs.toml", "[models", 'base = "localhost/base:1"\n[models')
    assert "bud --format docker" in project.invoke("build-container", "small", "--dry-run").stdout
    edit(project, "jobs.toml", 'base = "localhost/base:1"\n', "")
    assert "bud --format oci" in project.invoke("build-container", "small", "--dry-run").stdout
    edit(project, "image/Dockerfile", "LABEL", "HEALTHCHECK CMD true\nLABEL")
    assert "bud --format docker" in project.invoke("build-container", "small", "--dry-run").stdout


def test_the_image_says_what_it_was_made_of(project: Project) -> None:
    """By labels, and by arguments that its Dockerfile declares; what jobs.toml gives goes
    before."""
    base(project, "1")
    name = "localhost/base:1"
    more = f'base = "{name}"\nbuild_args = {{ IMAGE_VERSION = "7" }}\n'
    edit(project, "jobs.toml", "[models", f"{more}[models")
    more = "ARG IMAGE_REVISION\nARG IMAGE_VERSION\nLABEL v=$IMAGE_VERSION"
    edit(project, "image/Dockerfile", "LABEL", more)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=project.path, check=True)
    shown = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project.path, capture_output=True, text=True, check=True
    )
    head = shown.stdout.strip()
    image = built(project)["image"]
    assert image["commit"] == head and image["base"] == name
    asked = ("inspect", "--type", "image", "--format", "{{.Docker.Config.Labels}}", "trainkit-app")
    labels = buildah(*asked).removeprefix("map[").removesuffix("]").split()
    assert f"org.opencontainers.image.revision:{head}" in labels and "v:7" in labels
    assert f"org.opencontainers.image.base.name:{name}" in labels
    log = (project.path / "stamps/build-container/app.units/build.log").read_text()
    assert f"--build-arg IMAGE_REVISION={head} --build-arg IMAGE_VERSION=7 " in log


def test_a_disk_that_is_full_in_the_middle(project: Project, tmp_path: Path) -> None:
    """Nothing half-made is fresh, and what was there before still is."""
    first = built(project)["image"]["digest"]
    record = project.path / "images/app.built.json"
    before = record.read_text()
    small = tmp_path / "small"
    small.mkdir()
    (project.path / "src/large").write_bytes(os.urandom(2**22))
    argv = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    storage = tmp_path / "storage.conf"
    large = storage.read_text()
    try:
        storage.write_text(large.replace(str(tmp_path), str(small)))
        said = refused(project)
        assert "the disk is full" in said and "make room" in said
        shown = project.document("build-container", "small", "--dry-run")["stages"][0]
        assert not shown["fresh"] and "the disk is full" in shown["because"]
        assert record.read_text() == before
    finally:
        storage.write_text(large)
        unmount(small)
    assert buildah("inspect", "--format", "{{.FromImageID}}", "trainkit-app") in first
    assert built(project)["image"]["digest"] != first
    assert built(project)["fresh"]


def test_a_client_without_its_daemon(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker's client is not installed")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{project.path}/nothing.sock")
    edit(project, "jobs.toml", 'runtime = "podman"\nbuilder = "buildah"', 'runtime = "docker"')
    said = refused(project)
    assert "`docker version` exited with 1: the builder's daemon does not answer" in said
    assert "--builder buildah" in said


def test_push_takes_the_builders_own_way(project: Project) -> None:
    """To a registry that is not there: the command line is real, its failure explained."""
    edit(project, "jobs.toml", "[models", 'registry = "localhost:1/group"\n[models')
    dry = project.invoke("build-container", "small", "--push", "--dry-run").stdout
    line = "buildah push --format v2s2 trainkit-app docker://localhost:1/group/trainkit-app"
    assert f"would run {line}\n" in dry
    said = refused(project, "--push")
    assert f"+ {line}\n" in said and "cannot be reached from here" in said
    assert built(project)["fresh"], "it was built all the same"


def test_train_makes_the_image_first(project: Project) -> None:
    said = project.invoke("train", "small", "--dry-run").stdout
    assert "build-container app is stale because it was never made here" in said
    assert said.index("build-container app") < said.index("buildah bud")
    assert "trainkit-app" in said.partition("buildah bud")[2]
    said = project.invoke("train", "small", "--no-stages", exit=5).stderr
    assert "build-container app: stale because it was never made here" in said
