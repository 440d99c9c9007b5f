"""Where test data lies that is not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TRAINKIT_TEST_DATA"
MISSING = f"no golden files: set {VARIABLE} to the folder that holds golden/"


def golden() -> Path | None:
    """The files that Megatron-LM's own code wrote: `$TRAINKIT_TEST_DATA/golden`, or
    ../shared/data/golden beside the checkout; None if absent."""
    root = Path(__file__).resolve().parent.parent
    data = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else root.parent / "shared" / "data"
    return data / "golden" if (data / "golden" / "manifest.json").is_file() else None
