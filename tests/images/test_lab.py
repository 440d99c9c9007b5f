"""The lab itself."""

from __future__ import annotations

from tests.images.lab import DEBIAN, TINY, TORCH, Lab


def test_images_are_there(lab: Lab) -> None:
    for image in (DEBIAN, TORCH, TINY):
        lab.call("buildah", "inspect", "--type", "image", image)
