"""The stage build: the C++ extension is the one its source says. As a program: the unit that
compiles it.

In a checkout the hash of csrc/ is compared with the one compiled into `trainkit._index`; in an
installed package there is nothing to compile, only to check.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.install import InstallError, build_extension, csrc_sha256
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.schema import Job
from trainkit.stages.contract import Need, Unit

CHECKOUT = Path(trainkit.__file__).parent.parent


def compiled_sha256() -> str:
    """The csrc hash inside the extension that a new process would import; "" where none can be.

    Asked of another process: this one must not map a file that is about to be replaced.
    """
    code = "import trainkit._index as i; print(i.csrc_sha256)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout.strip()
    return ""


def _evidence() -> tuple[bool, str]:
    compiled = compiled_sha256()
    if compiled == csrc_sha256(CHECKOUT):
        return True, f"the extension was compiled from this source ({compiled[:12]})"
    return False, (
        "the source in csrc/ changed since the extension was compiled"
        if compiled
        else "the extension was never compiled"
    )


@dataclass(frozen=True)
class BuildSpec:
    """The spec of the unit that compiles: the checkout, and the hash of its csrc/."""

    root: Path
    csrc: str

    def to_json(self) -> dict[str, object]:
        return {"root": str(self.root), "csrc": self.csrc}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BuildSpec:
        return cls(Path(value["root"]), value["csrc"])


class BuildStage:
    """The extension every job needs."""

    name = "build"

    def needs(self, job: Job | None, stamps: Path) -> list[Need]:
        if not (CHECKOUT / "csrc").is_dir():
            if not compiled_sha256():
                raise TrainkitError(
                    "the installed trainkit has no working C++ extension",
                    exit=Exit.STAGE_FAILED,
                    hint=(
                        f"install it again from its checkout: {sys.executable} -m pip install"
                        " --force-reinstall --no-deps CHECKOUT"
                    ),
                )
            return []
        spec = BuildSpec(CHECKOUT, csrc_sha256(CHECKOUT))
        unit = Unit(
            "compile",
            (sys.executable, "-I", "-m", "trainkit.stages.build"),
            spec.to_json(),
        )
        return [
            Need(
                self.name,
                "index",
                "index",
                1,
                {"csrc": spec.csrc},
                (),
                (),
                (unit,),
                evidence=_evidence,
            )
        ]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile the extension for the running Python. Nothing else of the installation is touched."""
    spec = BuildSpec.from_json(value)
    try:
        build_extension(spec.root, Path(sys.executable))
    except InstallError as error:
        raise TrainkitError(str(error), exit=Exit.STAGE_FAILED) from None
    if compiled_sha256() != csrc_sha256(spec.root):
        raise TrainkitError(
            "the extension was built but does not load as built from csrc/", exit=Exit.STAGE_FAILED
        )
    return {}


if __name__ == "__main__":
    run_unit(work)
