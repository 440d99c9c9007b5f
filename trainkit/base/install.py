"""Installs this checkout into an environment, once for every change of what it is made from.

`inv` runs this file by path before anything is installed (`python3 -I -S
trainkit/base/install.py ensure [--extension] [EXTRA ...]`), setup.py loads `csrc_sha256` from
it, the build stage imports `build_extension`. So it imports the standard library only, and of
that little on the fast path.

What counts as installed is said by one file, `.venv/trainkit-install.json`: the fingerprint of
everything the installation depends on. It is gone meanwhile. csrc/ is not part of it: the compiled
extension holds the hash of its source, and when that changed, only the extension is compiled
again. Who installs holds a lock on `.venv.lock`, and writes into it which environment it is at.
An environment that is still named there when the next one gets the lock was left half done, and
is made again. All environments of a checkout share the lock: each compiles there.

pip installs uv, and uv the rest: it is faster. It reads nothing of pip's configuration, so that is
handed on. pip does it all where uv is not to be had or has no word for a setting of pip's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

CHECKOUT_FILES = ("pyproject.toml", "setup.py", "constraints.txt")
# as trainkit.base.errors.Exit; this file cannot import it
EXIT_FAILED = 6
EXIT_INTERRUPTED = 130
TAIL = 30  # lines of a step shown when it fails
UV_VARIABLES = {  # pip's setting: uv's
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-cache-dir": "UV_NO_CACHE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
# pip's settings that do not decide what is installed
PIP_ALONE = (
    *("break-system-packages", "cache-dir", "compile", "config-file", "disable-pip-version-check"),
    *("log", "no-color", "no-compile", "no-input", "no-python-version-warning", "progress-bar"),
    *("quiet", "require-virtualenv", "retries", "root-user-action", "verbose"),
)


class InstallError(Exception):
    """The installation failed; the text says why and what to do. Exit code 6."""


class HalfDoneError(InstallError):
    """It failed, and the environment is no longer what it was before."""


def _say(text: str) -> None:
    print(f"trainkit: {text}", file=sys.stderr, flush=True)


def _hash_files(root: Path, names: Collection[str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def csrc_sha256(root: Path, part: str = "index") -> str:
    """Hex SHA-256 over the names and contents of all files below csrc/index, or another part."""
    paths = [path for path in (root / "csrc" / part).rglob("*") if path.is_file()]
    return _hash_files(root, [str(path.relative_to(root)) for path in paths])


def extension_path(root: Path) -> Path:
    """Where a checkout has its compiled extension for the running Python."""
    from importlib.machinery import EXTENSION_SUFFIXES

    return root / "trainkit" / f"_index{EXTENSION_SUFFIXES[0]}"


def extension_is_current(root: Path) -> bool:
    """Whether the compiled extension holds the hash of the source in csrc/. Nothing is loaded."""
    try:
        return csrc_sha256(root).encode() in extension_path(root).read_bytes()
    except OSError:
        return False


class Environment:
    """A folder of a checkout with a Python of its own.

    Args:
        root: the checkout.
        folder: the folder's name there.
        pins: a file of the checkout with more packages, each with its version. They are put in
            without what they ask for, so that packages that contradict each other may be there.
        constraints: the file of the checkout that versions are chosen by; "": constraints.txt.
    """

    def __init__(self, root: Path, folder: str, pins: str = "", constraints: str = "") -> None:
        self.root = root
        self.folder = folder
        self.pins = pins
        self.constraints = constraints or "constraints.txt"
        self.path = root / folder
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "trainkit-install.json"


def fingerprint(root: Path, extras: Collection[str], pins: str = "") -> str:
    """What an installation depends on, as one hash: the files that describe it, this file, the
    folder, Python's ABI, the extras."""
    names = [*CHECKOUT_FILES, "trainkit/base/install.py", *filter(None, [pins])]
    place = [os.path.realpath(root), sys.implementation.cache_tag, os.uname().machine]
    parts = [_hash_files(root, names), *place, *sorted(set(extras))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _recorded_extras(environment: Environment) -> set[str] | None:
    """The extras of a finished installation that is of this fingerprint, or None."""
    try:
        stamp = json.loads(environment.stamp.read_bytes())
        extras = {str(e) for e in stamp["extras"]}
        current = stamp["fingerprint"] == fingerprint(environment.root, extras, environment.pins)
        return extras if current else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_extra(root: Path, extra: str) -> bool:
    """Whether the checkout's own .venv was installed with this extra."""
    return extra in (_recorded_extras(Environment(root, ".venv")) or ())


def _fresh(environment: Environment, extras: Collection[str]) -> bool:
    recorded = _recorded_extras(environment)
    has_all = recorded is not None and recorded.issuperset(extras)
    return has_all and os.access(environment.python, os.X_OK)


def _write_stamp(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(root: Path, environment: str = "") -> Iterator[tuple[int, bool]]:
    """Hold the lock; gives its file descriptor, and whether the former holder died while it
    changed the same environment. Without one: for what changes none, and spoils none if killed."""
    import fcntl

    handle = os.open(root / ".venv.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(handle).get("pid", "?")
            _say(f"process {pid} is installing this checkout; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        unfinished = _unfinished(handle)
        died = environment in unfinished
        _write_words(handle, pid=os.getpid(), unfinished=sorted({*unfinished, environment} - {""}))
        try:
            yield handle, died
        except InstallError as error:
            if not isinstance(error, HalfDoneError):
                _write_words(handle, unfinished=sorted(unfinished - {environment}))
            raise
        _write_words(handle, unfinished=sorted(unfinished - {environment}))
    finally:
        os.close(handle)


def _holder(handle: int) -> dict[str, object]:
    try:
        return dict(json.loads(os.pread(handle, 65536, 0)))
    except (ValueError, TypeError):
        return {}


def _unfinished(handle: int) -> set[str]:
    """Environments whose installation was begun and not ended."""
    words = _holder(handle).get("unfinished")
    return {str(w) for w in words} if isinstance(words, list) else set()


def _write_words(handle: int, **words: object) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(words).encode(), 0)


def missing_tools() -> list[str]:
    """What the extension needs to be compiled and is not here, each with the way to get it."""
    import shlex
    import shutil
    import sysconfig

    missing = []
    # as setuptools chooses it
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        program = f"a C++ compiler (looked for {compiler})"
        missing.append(f"{program}: apt-get install g++, or dnf install gcc-c++")
    folders = [sysconfig.get_path("include"), *os.environ.get("CPATH", "").split(os.pathsep)]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders if folder):
        headers = f"Python's headers (looked for {folders[0]}/Python.h)"
        missing.append(f"{headers}: apt-get install python3-dev, or dnf install python3-devel")
    return missing


def _require_tools() -> None:
    lines = "".join(f"\n  - {missing}" for missing in missing_tools())
    if lines:
        raise InstallError(f"the C++ extension cannot be compiled here; missing:{lines}")


def pip_command(environment: Environment, what: Sequence[str]) -> list[str]:
    """What puts `what` into an environment by pip, in the checkout's folder."""
    pip = ["-P", "-m", "pip", "install", "--disable-pip-version-check"]
    return [str(environment.python), *pip, *what, "-c", environment.constraints]


def pip_settings(environment: Environment) -> dict[str, str]:
    """What pip is configured with for an environment, by its files and by PIP_* variables.

    Raises InstallError if pip cannot say it.
    """
    import ast
    import re
    import subprocess

    argv = [str(environment.python), "-P", "-m", "pip", "config", "list"]
    done = subprocess.run(argv, cwd=environment.root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"pip cannot read its configuration: {done.stderr.strip()}")
    lines = re.findall(r"^(global|install|:env:)\.([a-z-]+)=(.+)$", done.stdout, re.MULTILINE)
    settings = {}
    for level in ("global", "install", ":env:"):  # the later one counts, as for pip
        settings.update({key: ast.literal_eval(said) for at, key, said in lines if at == level})
    return settings


def _uv_command(environment: Environment) -> tuple[list[str], dict[str, str]]:
    """uv's command and environment variables, with the settings that pip has there.

    Raises InstallError for a setting that uv has no word for.
    """
    settings = pip_settings(environment)
    command = [str(environment.path / "bin" / "uv"), "pip", "install"]
    command += ["--python", str(environment.python)]
    # the newest version of all indexes, as pip takes, not only of the first that has any
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for key, value in settings.items():
        if key in UV_VARIABLES:  # no arguments, which all users see: an index may hold a password
            separator = "," if key == "find-links" else " "
            variables[UV_VARIABLES[key]] = separator.join(value.split())
        elif key == "constraint":
            command += [word for path in value.split() for word in ("-c", path)]
        elif key == "no-index":
            command += ["--no-index"] * (value.lower() in ("1", "on", "t", "true", "y", "yes"))
        elif key not in PIP_ALONE:
            raise InstallError(f"uv has no word for pip's setting {key} = {value!r}")
    return command, {**variables, **os.environ}  # what is said to uv itself counts


def run_step(
    command: list[str],
    root: Path,
    lock: int,
    variables: Mapping[str, str] | None = None,
    *,
    shown: bool = False,
) -> None:
    """Run a step of the installation, with our environment variables or others. It inherits the
    lock: should we be killed, nobody else begins before it has ended too. A Ctrl-C reaches it too.

    Raises InstallError if it fails, with its last lines, unless all were `shown` on our stderr.
    """
    import subprocess

    done = subprocess.run(
        command,
        cwd=root,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        check=False,
    )
    if done.returncode:
        tail = (done.stdout or b"").decode(errors="replace").rstrip().split("\n")[-TAIL:]
        said = "\n".join(["the last lines of it:", *(f"  | {line}" for line in tail)])
        raise InstallError(
            f"the installation failed (exit code {done.returncode}) at {' '.join(command)} in"
            f" {root}; {'its words are above' if shown else said}"
        )


def _changed(environment: Environment) -> list[int]:
    """When packages came or went last, in ns."""
    return [f.stat().st_mtime_ns for f in environment.path.glob("lib/python*/site-packages")]


def _by_uv(environment: Environment, what: Sequence[str], lock: int) -> bool:
    """Have pip put uv into an environment, and uv the rest; False, with the reason on stderr,
    where pip has to do it: uv is not to be had, or fails before it changed anything.

    Raises HalfDoneError if it fails later: pip undoes what it did, uv does not.
    """
    wheel = ["--quiet", "--only-binary", "uv", "uv"]  # never compiled here: it is Rust
    before = []
    try:
        command, variables = _uv_command(environment)
        run_step(pip_command(environment, wheel), environment.root, lock)
        before = _changed(environment)
        command += [*what, "-c", environment.constraints]
        run_step(command, environment.root, lock, variables, shown=True)
    except InstallError as error:
        if before and before != _changed(environment):
            raise HalfDoneError(str(error)) from None
        _say(f"pip does it, as uv cannot: {error}")
        return False
    return True


def _install(environment: Environment, extras: Collection[str], lock: int) -> None:
    """Run uv, or pip; the environment's stamp is away meanwhile, and comes back as it was if that
    fails."""
    import time

    from tomllib import loads

    root, stamp = environment.root, environment.stamp
    former = b""
    had = _recorded_extras(environment)
    if stamp.exists():
        former = stamp.read_bytes()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extras = {*extras, *json.loads(former)["extras"]}
        stamp.unlink()
    made_from = fingerprint(root, extras, environment.pins)
    words = {"schema": "install/1", "fingerprint": made_from, "extras": sorted(set(extras))}
    if had is None:
        steps = [["-e", f".[{','.join(words['extras'])}]" if extras else "."]]
    else:  # the checkout itself is there, and need not be compiled again
        needs = loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        steps = [[word for extra in sorted({*extras} - had) for word in needs[extra]]]
    if environment.pins:
        steps.append(["--no-deps", "-r", environment.pins])
    what = " and ".join(step[-1] for step in steps)
    _say(f"installing {what} into {environment.path}; the first time this takes minutes")
    began = time.monotonic()
    try:
        for step in steps:
            if not _by_uv(environment, step, lock):
                run_step(pip_command(environment, step), root, lock, shown=True)
    except InstallError as error:
        if former and not isinstance(error, HalfDoneError):
            _write_stamp(stamp, former)
        raise
    _write_stamp(stamp, json.dumps(words, indent=1).encode())
    _say(f"installed in {time.monotonic() - began:.0f} s")


def _compile(root: Path, python: Path, lock: int) -> None:
    """Compile the extension beside its place, and move it there: processes that have the former
    one mapped keep it."""
    import tempfile
    import time

    _say("csrc/ changed: compiling the extension")
    began = time.monotonic()
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="extension-", dir=root / "build") as folder:
        where = ["--build-lib", f"{folder}/lib", "--build-temp", f"{folder}/temp"]
        run_step([str(python), "setup.py", "build_ext", *where], root, lock)
        made = list(Path(folder, "lib", "trainkit").glob("_index.*"))
        if len(made) != 1:
            raise InstallError(f"setup.py in {root} made {len(made)} extensions, not 1")
        with open(made[0], "rb") as file:
            os.fsync(file.fileno())
        os.replace(made[0], root / "trainkit" / made[0].name)
    _say(f"compiled in {time.monotonic() - began:.0f} s")


def build_extension(root: Path, python: Path) -> None:
    """Compile the extension of the checkout `root` for the Python `python`, in whose environment
    the checkout is installed.

    Waits for another installation of the same checkout. Raises InstallError if a compiler or
    header is missing, or the compilation failed.
    """
    _require_tools()
    with locked(root) as (lock, _):
        _compile(root, python, lock)


def _works(python: Path) -> bool:
    """Whether the environment's Python starts, is of our ABI and has pip."""
    import subprocess

    argv = [str(python), "-I", "-c", "import sys, pip; print(sys.implementation.cache_tag)"]
    try:
        tag = subprocess.check_output(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    return tag.strip() == sys.implementation.cache_tag.encode()


def _make_venv(environment: Environment, lock: int) -> None:
    import importlib.util

    # not the Python of the .venv that is about to be cleared
    base = str(getattr(sys, "_base_executable", sys.executable))
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing = "its venv module: apt-get install python3-venv"
        raise InstallError(f"{base} cannot make an environment; missing:\n  - {missing}")
    _say(f"making {environment.folder} with {base} (Python {sys.version.split()[0]})")
    run_step([base, "-I", "-m", "venv", "--clear", str(environment.path)], environment.root, lock)


def ensure(
    root: Path,
    extras: Collection[str],
    folder: str = ".venv",
    pins: str = "",
    constraints: str = "constraints.txt",
    *,
    extension: bool = False,
) -> None:
    """Have an environment with this checkout and at least these extras in it; does nothing if it
    is fresh. See `Environment`.

    Args:
        extension: compile the extension too, should csrc/ have changed since.

    Raises:
        InstallError: a compiler or header is missing, or pip or the compilation failed.
    """
    environment = Environment(root, folder, pins, constraints)

    def compiled() -> bool:
        return not extension or extension_is_current(root)

    if _fresh(environment, extras) and compiled():
        return
    _require_tools()
    if not _fresh(environment, extras):
        with locked(root, str(environment.path)) as (lock, died):
            if not _fresh(environment, extras):  # else who held the lock has done it
                if died or not _works(environment.python):
                    if environment.path.exists():
                        _say(f"{folder} is unfinished or has no working Python; it is made again")
                    _make_venv(environment, lock)
                _install(environment, extras, lock)
    if not compiled():
        with locked(root) as (lock, _):
            if not compiled():
                _compile(root, environment.python, lock)


def main(argv: list[str]) -> int:
    """`ensure [--extension] [EXTRA ...]` for the checkout this file lies in; returns the exit
    code."""
    if argv[:1] != ["ensure"]:
        _say("usage: install.py ensure [--extension] [EXTRA ...]")
        return 1
    try:
        if sys.version_info < (3, 11):  # .venv may be somebody's older one
            raise InstallError(
                f"{sys.executable} is Python {sys.version.split()[0]}, 3.11 or newer is needed;"
                " delete .venv if it is in there"
            )
        extras = [word for word in argv[1:] if word != "--extension"]
        ensure(Path(__file__).resolve().parents[2], extras, extension="--extension" in argv)
    except InstallError as error:
        _say(f"{error}\n  The next ./inv tries again.")
        return EXIT_FAILED
    except OSError as error:
        _say(f"the installation failed: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _say("interrupted; the next ./inv starts the installation again")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
