"""The stage build: what is compiled is what its source says. As a program: the unit that compiles.

Two pieces: `trainkit._index`, the extension that every job needs, and the fused kernels, which
jobs of the native engine compute with on CPUs. In a checkout the hashes compiled into both are
compared with csrc/; in an installed package there is nothing to compile, only to check.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import unpack_from
from typing import Any

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.install import (
    InstallError,
    build_extension,
    csrc_sha256,
    extension_is_current,
    extension_path,
)
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.schema import Job
from trainkit.ops.build import build_kernels, missing_tools, staleness
from trainkit.stages.contract import Need, Unit

CHECKOUT = Path(trainkit.__file__).parent.parent
INDEX = "index"
KERNELS = "kernels"
HINTS = {KERNELS: "jobs with kernels = 'reference' train without them"}


def _load_error() -> str:
    """What loading the extension into this process raises; "" where it loads."""
    try:
        import trainkit._index  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def _said_by(code: str) -> tuple[str, str]:
    """What another process of this Python says on stderr and, if it succeeds, on stdout."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == 0:
        return "", done.stdout.strip()
    return done.stderr.strip(), ""


def _index_evidence() -> tuple[bool, str]:
    if not extension_is_current(CHECKOUT):
        return False, "the extension is not compiled from the source that csrc/ has now"
    content = extension_path(CHECKOUT).read_bytes()
    # elf(5): the table of sections, which a linker writes last; mapping less ends this process
    start, size, count = unpack_from("<Q10x2H", content, 40)
    if len(content) < start + size * count:
        return False, "the compiled extension is cut short"
    # only now: what is about to be replaced must not be mapped
    if error := _load_error():
        return False, f"the extension does not load here: {error}"
    compiled = csrc_sha256(CHECKOUT)[:12]
    return True, f"the extension was compiled from this source ({compiled})"


def _kernels_evidence() -> tuple[bool, str]:
    because = staleness(CHECKOUT)
    fresh = f"the kernels were compiled from this source ({csrc_sha256(CHECKOUT, KERNELS)[:12]})"
    return not because, because or fresh


EVIDENCE: dict[str, Callable[[], tuple[bool, str]]] = {
    INDEX: _index_evidence,
    KERNELS: _kernels_evidence,
}


@dataclass(frozen=True)
class BuildSpec(Record):
    """The spec of the unit that compiles.

    Args:
        root: the checkout.
        part: INDEX or KERNELS.
        csrc: the hash of its source.
    """

    root: Path
    part: str
    csrc: str


def _wants_kernels(job: Job | None) -> bool:
    """Whether a job needs the kernels compiled; without a job they are asked for. With `auto` a
    machine that cannot compile them is none that must: its ranks say what they compute with."""
    if job is None:
        return True
    if not job.is_native or job.cluster.device_type != "cpu" or job.kernels == "reference":
        return False
    return job.kernels == "fused" or not missing_tools()


class BuildStage:
    """The extension every job needs, and the kernels."""

    name = "build"

    def needs(self, job: Job | None, stamps: Path) -> list[Need]:
        if not (CHECKOUT / "csrc").is_dir():
            if _load_error():
                raise TrainkitError(
                    "the installed trainkit has no working C++ extension",
                    exit=Exit.STAGE_FAILED,
                    hint=(
                        f"install it again from its checkout: {sys.executable} -m pip install"
                        " --force-reinstall --no-deps CHECKOUT"
                    ),
                )
            return []
        if _wants_kernels(job):
            return [_need(INDEX), _need(KERNELS)]
        return [_need(INDEX)]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()


def _need(part: str) -> Need:
    spec = BuildSpec(CHECKOUT, part, csrc_sha256(CHECKOUT, part))
    program = (sys.executable, "-I", "-m", "trainkit.stages.build")
    unit = Unit("compile", program, spec.to_json())
    settings = {"csrc": spec.csrc}
    return Need(BuildStage.name, part, part, 1, settings, (), (), (unit,), evidence=EVIDENCE[part])


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile for the running Python. Nothing else of the installation is touched."""
    spec = BuildSpec.from_json(value)
    try:
        if spec.part == KERNELS:
            build_kernels(spec.root, Path(sys.executable))
        else:
            build_extension(spec.root, Path(sys.executable))
    except InstallError as error:
        raise TrainkitError(
            str(error), exit=Exit.STAGE_FAILED, hint=HINTS.get(spec.part, "")
        ) from None
    if spec.part == KERNELS:
        said, _ = _said_by("from trainkit.ops import kernels; kernels.choose('fused', 'cpu')")
        if said:
            raise TrainkitError(
                f"the kernels were built but do not load: {said.splitlines()[-1]}",
                exit=Exit.STAGE_FAILED,
                hint=HINTS[KERNELS],
            )
    elif not extension_is_current(spec.root) or _load_error():
        raise TrainkitError(
            "the extension was built but does not load as built from csrc/", exit=Exit.STAGE_FAILED
        )
    return {}


if __name__ == "__main__":
    run_unit(work)
