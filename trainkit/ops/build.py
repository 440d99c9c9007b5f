"""Compiles csrc/kernels into one library for the running Python's torch, and says what a compiled
one was made from. Needs neither torch itself nor anything else beyond the standard library: of
torch it reads the version and the headers. As a program: compiles into a folder.

The library uses torch's stable ABI from TARGET on, so it has no part of Python's or of ATen's. It
holds a line of text that says its source, torch and compiler (`Origin`): what it was made from is
read from the file, nothing is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.base.install import InstallError, csrc_sha256, locked, run_step

CHECKOUT = Path(__file__).resolve().parents[2]
LIBRARY_FILE = CHECKOUT / "trainkit" / "_kernels.abi3.so"
TARGET = (2, 11)  # of torch: the oldest that the library's calls are there in
FLAGS = (
    "-std=c++20",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-fopenmp-simd",
    # not -ffast-math: NaN and inf come out where they went in
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    f"-DTORCH_TARGET_VERSION={TARGET[0] << 56 | TARGET[1] << 48:#x}",
    "-DTORCH_STABLE_ONLY",
)
MARK = b"trainkit-kernels/1 "  # before the text in the library, which ends with a zero byte


@dataclass(frozen=True)
class Origin:
    """What a library was made from.

    Args:
        source: SHA-256 of csrc/kernels.
        torch: its version, whose headers were used.
        compiler: the first line that it says of itself.
        flags: SHA-256 of how it was called.
    """

    source: str
    torch: str
    compiler: str
    flags: str


def torch_folder() -> Path | None:
    """Where torch is installed for the running Python; nothing is imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent


@functools.cache  # `plan --search` asks for each layout
def torch_version() -> str:
    """Of the torch that the running Python would import; "" without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def compiler() -> list[str]:
    """The C++ compiler's words, as setuptools chooses them."""
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")[:1]


def missing_tools() -> list[str]:
    """What the kernels cannot be compiled without and is not here, each with the way to get it."""
    missing = []
    [program] = compiler()
    if shutil.which(program) is None:
        missing.append(
            f"a C++ compiler (looked for {program}): apt-get install g++, or dnf install gcc-c++"
        )
    folder = torch_folder()
    if folder is None:
        missing.append("torch: pip install torch")
    elif not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
        missing.append(f"torch's headers (looked for {folder}/include/torch/csrc/stable)")
    return missing


def wanted(root: Path) -> Origin:
    """What a library of the checkout `root` would be made from now; without a compiler here its
    line is ""."""
    said = ""
    if shutil.which(compiler()[0]) is not None:
        asked = subprocess.run(
            [*compiler(), "--version"], capture_output=True, text=True, check=False
        )
        said = asked.stdout.partition("\n")[0]
    flags = hashlib.sha256("\0".join([*FLAGS, platform.machine()]).encode()).hexdigest()
    return Origin(csrc_sha256(root, "kernels"), torch_version(), said, flags)


def origin_of(library: Path) -> Origin | None:
    """What a compiled library says it was made from; None where there is none, or it says
    nothing."""
    try:
        _, mark, rest = library.read_bytes().partition(MARK)
        if not mark:
            return None
        return Origin(**json.loads(rest.partition(b"\0")[0]))
    except (OSError, ValueError, TypeError):
        return None


def staleness(root: Path) -> str:
    """Why the library of a checkout is to be compiled; "" while it is as its source."""
    made = origin_of(root / "trainkit" / LIBRARY_FILE.name)
    now = wanted(root)
    if made is None:
        return "the kernels were never compiled"
    if made.source != now.source:
        return "the source in csrc/kernels changed since the kernels were compiled"
    if made.torch != now.torch:
        return f"the kernels were compiled for torch {made.torch}, here is {now.torch}"
    if made.flags != now.flags:
        return "the kernels were compiled with other options"
    if now.compiler and made.compiler != now.compiler:
        return f"the kernels were compiled by {made.compiler}, here is {now.compiler}"
    return ""


def why_unusable(library: Path, torch: str) -> str:
    """Why a library cannot be used with a version of torch; "" if it can. One of other sources is
    not: its operations would be given other arguments than they expect."""
    made = origin_of(library)
    if made is None:
        return f"the fused kernels are not compiled ({library} is not there)"
    if made.torch.split(".")[:2] != torch.split(".")[:2]:
        return f"the fused kernels were compiled for torch {made.torch}, this is torch {torch}"
    root = library.parents[1]
    if (root / "csrc" / "kernels").is_dir() and made.source != csrc_sha256(root, "kernels"):
        return "the source in csrc/kernels changed since the fused kernels were compiled"
    return ""


@dataclass(frozen=True)
class Cuda:
    """What there is for fused operations on GPUs, whose kernels need no compiler here: Triton
    compiles them where they run.

    Args:
        state: "found", or what is missing.
        versions: of CUDA as torch has it, and of Triton.
        where: the GPUs.
    """

    state: str
    versions: str = ""
    where: str = ""


def find_cuda() -> Cuda:
    """Look for GPUs, a torch for them and Triton; nothing is imported."""
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    _, _, build = torch_version().partition("+")
    if build.startswith("cpu"):
        return Cuda(
            f"not used: torch {torch_version()} is a build for CPUs", where=", ".join(devices)
        )
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Cuda("not used: Triton is not installed", f"torch {torch_version()}")
    versions = f"torch {torch_version()}, Triton {triton}"
    if not devices:
        return Cuda("no GPU here", versions)
    return Cuda("found", versions, ", ".join(devices))


def compile_library(root: Path, out: Path) -> None:
    """Compile csrc/kernels of a checkout, its files beside one another, and link `out`. Prints
    the compiler's words; raises SystemExit with its exit code if it fails."""
    torch = torch_folder()
    assert torch is not None
    origin = json.dumps(asdict(wanted(root)))
    text = out.with_name("origin.cpp")
    # external, or the linker would drop it
    quoted = json.dumps(MARK.decode() + origin)
    text.write_text(
        f"__attribute__((used)) extern const char trainkit_kernels_origin[] =\n    {quoted};\n"
    )
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    sources = [*sorted((root / "csrc" / "kernels").glob("*.cpp")), text]

    def compiled(source: Path) -> Path:
        made = out.with_name(source.stem + ".o")
        _call([*compiler(), *FLAGS, *includes, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = [str(made) for made in pool.map(compiled, sources)]
    libraries = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
    _call([*compiler(), "-shared", *objects, *libraries, "-o", str(out)])


def _call(argv: list[str]) -> None:
    done = subprocess.run(argv, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _changed(path: Path) -> int:
    """When a file was made, in ns; 0 without one."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _build(root: Path, place: Path, python: Path, lock: int) -> None:
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernels-", dir=root / "build") as folder:
        made = Path(folder, place.name)
        program = [str(python), "-I", "-m", "trainkit.ops.build", str(root), str(made)]
        run_step(program, root, lock)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        os.replace(made, place)


def build_kernels(root: Path, python: Path) -> None:
    """Compile the kernels of the checkout `root` beside their place and move them there: who has
    the former ones mapped keeps them. Waits for another build of the same checkout, and is done
    if that one has made them.

    Args:
        root: the checkout.
        python: whose torch they are for.

    Raises:
        InstallError: a compiler or header is missing, or the compilation failed. The former
            library is gone then: nobody computes with what the source does not say.
    """
    place = root / "trainkit" / LIBRARY_FILE.name
    try:
        if missing := missing_tools():
            raise InstallError(
                "the kernels cannot be compiled here; missing:\n"
                + "\n".join(f"  - {m}" for m in missing)
            )
        before = _changed(place)
        with locked(root) as (lock, _):
            if _changed(place) == before or staleness(root):
                _build(root, place, python, lock)
    except InstallError:
        place.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    compile_library(Path(sys.argv[1]), Path(sys.argv[2]))
