"""A store of buildah's and podman's for tests that build on nothing: FROM scratch, in a second."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def scratch_store(folder: Path) -> dict[str, str]:
    """Variables by which both find an empty store below `folder`, whose builds' steps see this
    machine's /usr. Skips where no images can be built. containers-storage.conf(5),
    containers.conf(5)."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        pytest.skip("no images here: they need root and buildah")
    storage = folder / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
    )
    engine = folder / "containers.conf"
    engine.write_text('[containers]\nvolumes = ["/usr:/usr:ro"]\n')
    return {
        "CONTAINERS_STORAGE_CONF": str(storage),
        "CONTAINERS_CONF": str(engine),
        "BUILDAH_ISOLATION": "chroot",
    }
