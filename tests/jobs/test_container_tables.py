"""[containers.X]: images that are made here, and what they are called."""

from __future__ import annotations

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout
from trainkit.jobs.containers import Container


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('runtime = "docker"', "an image is missing: image, or what it is made of"),
        ('dockerfile = "D"\nsource = "docker://a"', "source and dockerfile exclude each other"),
        ('image = "a"\nbase = "b"', "base is of a build, and there is no dockerfile"),
        ('image = "a"\ntag = "b"', "tag is of a build"),
        ('image = "a"\nbuilder = "buildah"', "builder is of an image made here"),
        ('image = "a"\nstripe = {}', "stripe is of an image made here"),
        ('source = "ubuntu"', "source = 'ubuntu': it begins with docker://, dockerd://, podman://"),
        ('source = "docker://a"\nruntime = "docker"', "source is of image files"),
        ('dockerfile = "D"\nruntime = "docker"\nstage_to = "/mnt"', "stage_to is of image files"),
        ('dockerfile = "D"\nruntime = "apptainer"\nsquashfs = {}', "starts no .sqsh file"),
        ('dockerfile = "D"\nimage = "nvcr.io#a/b:1"', "is a file, *.sqsh or *.squashfs"),
        ('dockerfile = "D"\ntag = "a@sha256:' + "0" * 64 + '"', "a digest is not chosen"),
        ('dockerfile = "D"\nbase = "A"', "base = 'A' is not an image reference"),
        (
            'dockerfile = "D"\nregistry = "https://r.io"',
            "registry = 'https://r.io' is not an image",
        ),
        ('dockerfile = "D"\nbuilder = "kaniko"', "kaniko"),
        ('dockerfile = "D"\nbuild_args = { "A B" = "1" }', "A B"),
        (
            'dockerfile = "D"\nsquashfs = { compression = "lz4", level = 3 }',
            "level = 3: lz4 has no levels",
        ),
        (
            'dockerfile = "D"\nsquashfs = { compression = "gzip", level = 19 }',
            "level = 19: gzip has levels 1 to 9",
        ),
        ('dockerfile = "D"\nstripe = { size = "1" }', "size"),
        ('dockerfile = "D"\nstripe = { count = -2 }', "count"),
    ],
)
def test_what_does_not_fit(lines: str, words: str, checkout: Checkout) -> None:
    problems = checkout(f"{GOOD}\n[containers.c]\n{lines}\n").check()
    assert any(words in str(problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("runtime", "more", "image"),
    [
        ("docker", "", "trainkit-c"),
        ("podman", 'tag = "r.io/mine:2"\n', "r.io/mine:2"),
        ("enroot", "", "{}/far/images/c.sqsh"),
        ("pyxis", "", "{}/far/images/c.sqsh"),
        ("apptainer", "", "{}/far/images/c.sif"),
        ("pyxis", 'image = "/apps/mine.sqsh"\n', "/apps/mine.sqsh"),
    ],
)
def test_what_the_image_is_called(runtime: str, more: str, image: str, checkout: Checkout) -> None:
    launcher = 'launcher = "slurm"\n' if runtime == "pyxis" else ""
    text = (
        f'{GOOD}\n[clusters.far]\nroot = "far"\n{launcher}'
        f'[containers.c]\nruntime = "{runtime}"\ndockerfile = "image/Dockerfile"\n{more}'
    )
    jobs = checkout(text)
    assert jobs.check() == []
    (name, *_) = jobs.names()
    resolved = jobs.resolve(name, ["cluster=far", "container=c"])
    container = resolved.job.container
    assert container is not None
    assert container.image == image.replace("{}", str(jobs.root))
    assert container.dockerfile == str(jobs.root / "image/Dockerfile")
    assert container.context == str(jobs.root)
    assert Container.model_validate(container.model_dump(mode="json")) == container
    assert "container.image" in resolved.origins
