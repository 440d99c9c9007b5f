"""The lab itself."""

from __future__ import annotations

import pytest

from tests.images.lab import TINY, TORCH, Lab


@pytest.mark.timeout(1800)  # the first of a machine makes the base
def test_images_are_there(lab: Lab) -> None:
    for image in (TORCH, TINY):
        lab.call("buildah", "inspect", "--type", "image", image)
