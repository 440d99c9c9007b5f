"""Installs this checkout into an environment, once for every change of what it is made from.

`inv` runs this file by path before anything is installed (`python3 -I -S
trainkit/base/install.py ensure [--extension] [EXTRA ...]`), setup.py loads `csrc_sha256` from
it, the build stage imports `build_extension`. So it imports the standard library only, and of
that little on the fast path.

What counts as installed is said by one file, `.venv/trainkit-install.json`: the fingerprint of
everything the installation depends on. It is gone while pip runs. csrc/ is no part of it: the
compiled extension holds the hash of its source, and when that changed, only the extension is
compiled again. Who installs holds a lock on `.venv.lock`, and writes into it which environment
it is at. An environment that is still named there when the next one gets the lock was left half
done, and is made again. All environments of a checkout share the lock: each compiles there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

CHECKOUT_FILES = ("pyproject.toml", "setup.py", "constraints.txt")
# as trainkit.base.errors.Exit; this file cannot import it
EXIT_FAILED = 6
EXIT_INTERRUPTED = 130
TAIL = 30  # of pip's lines shown when it fails


class InstallError(Exception):
    """The installation failed; the text says why and what to do. Exit code 6."""


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
    """Whether the compiled extension is of the source in csrc/: it holds that source's hash as a
    text. Nothing is loaded."""
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
        constraints: the file of the checkout that pip chooses versions by.
    """

    def __init__(
        self,
        root: Path,
        folder: str = ".venv",
        pins: str = "",
        constraints: str = "constraints.txt",
    ) -> None:
        self.root = root
        self.folder = folder
        self.pins = pins
        self.constraints = constraints
        self.path = root / folder
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "trainkit-install.json"


def fingerprint(root: Path, extras: Collection[str], pins: str = "") -> str:
    """What an installation depends on, as one hash: the files that describe it, this file, the
    folder, Python's ABI, the extras."""
    names = [*CHECKOUT_FILES, "trainkit/base/install.py", *filter(None, [pins])]
    parts = [
        _hash_files(root, names),
        os.path.realpath(root),
        sys.implementation.cache_tag,
        os.uname().machine,
        *sorted(set(extras)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _recorded_extras(environment: Environment) -> set[str] | None:
    """The extras of a finished installation that is of this fingerprint, or None."""
    try:
        stamp = json.loads(environment.stamp.read_bytes())
        extras = {str(e) for e in stamp["extras"]}
        if stamp["fingerprint"] == fingerprint(environment.root, extras, environment.pins):
            return extras
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_extra(root: Path, extra: str) -> bool:
    """Whether the checkout's own .venv was installed with this extra."""
    return extra in (_recorded_extras(Environment(root)) or ())


def _fresh(environment: Environment, extras: Collection[str]) -> bool:
    recorded = _recorded_extras(environment)
    return (
        recorded is not None
        and recorded.issuperset(extras)
        and os.access(environment.python, os.X_OK)
    )


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
    changed the same environment.

    Without an environment: for what changes none of them, so that being killed in it spoils none.
    """
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
        except InstallError:  # pip has undone what it did
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
    """What the extension cannot be compiled without and is not here, each with the way to get
    it."""
    import shlex
    import shutil
    import sysconfig

    missing = []
    # as setuptools chooses it
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        missing.append(
            f"a C++ compiler (looked for {compiler}): apt-get install g++, or dnf install gcc-c++"
        )
    folders = [sysconfig.get_path("include"), *os.environ.get("CPATH", "").split(os.pathsep)]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders if folder):
        missing.append(
            f"Python's headers (looked for {folders[0]}/Python.h): apt-get install python3-dev, or"
            " dnf install python3-devel"
        )
    return missing


def _require_tools() -> None:
    missing = missing_tools()
    if missing:
        raise InstallError(
            "the C++ extension cannot be compiled here; missing:\n"
            + "\n".join(f"  - {m}" for m in missing)
        )


def pip_command(environment: Environment, what: Sequence[str]) -> list[str]:
    """What puts `what` into an environment, run in the checkout's folder."""
    pip = ["-P", "-m", "pip", "install", "--disable-pip-version-check"]
    return [str(environment.python), *pip, *what, "-c", environment.constraints]


class _Progress:
    """pip's output on stderr: one changing line on a terminal, else only the lines that say what
    takes long."""

    LONG = (
        "Installing build dependencies",
        "Building editable",
        "Installing collected packages",
        "Successfully",
    )

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()

    def show(self, line: str) -> None:
        text = " ".join(line.split())
        if self.terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            print(f"\r\033[K{f'  {text}'[:width]}", end="", file=sys.stderr, flush=True)
        elif text.startswith(self.LONG) or (
            text.startswith("Downloading") and text.endswith((" MB)", " GB)"))
        ):
            print(f"  {text[:150]}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _interrupt_waits() -> Iterator[None]:
    """A Ctrl-C meanwhile is raised at the end."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # none is raised here
        return
    came = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came.is_set():
        handler(signal.SIGINT, None)


def run_step(command: list[str], root: Path, lock: int) -> None:
    """Run a step of the installation. It inherits the lock: should we be killed, nobody else
    begins before it has ended too.

    Raises InstallError with its last lines if it fails.
    """
    import subprocess
    from collections import deque

    tail: deque[str] = deque(maxlen=TAIL)
    progress = _Progress()
    child = None

    def follow(output: Iterable[bytes]) -> None:
        for raw in output:
            line = raw.decode(errors="replace").rstrip()
            if line:
                tail.append(line)
                progress.show(line)

    try:
        with _interrupt_waits():  # or Popen would be left before there is a child to end
            child = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                start_new_session=True,
            )
        reader = threading.Thread(target=follow, args=(child.stdout,), daemon=True)
        reader.start()
        # not read here: a signal just before a blocking read waits until that returns
        while reader.is_alive():
            reader.join(1.0)
        code = child.wait()
    except BaseException:
        if child is not None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, signal.SIGINT)  # pip removes its temporary files
                child.wait(timeout=5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        raise
    finally:
        progress.end()
    if code:
        lines = "\n".join(f"  | {line}" for line in tail)
        raise InstallError(
            f"the installation failed (exit code {code}); the last lines of {' '.join(command)} in"
            f" {root}:\n{lines}\n  The next ./inv tries again."
        )


def _install(environment: Environment, extras: Collection[str], lock: int) -> None:
    """Run pip; the environment's stamp is away meanwhile, and comes back as it was if pip fails."""
    import time

    root, stamp = environment.root, environment.stamp
    former = b""
    if stamp.exists():
        former = stamp.read_bytes()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extras = {*extras, *json.loads(former)["extras"]}
        stamp.unlink()
    words = {
        "schema": "install/1",
        "fingerprint": fingerprint(root, extras, environment.pins),
        "extras": sorted(set(extras)),
    }
    target = f".[{','.join(sorted(set(extras)))}]" if extras else "."
    what = target + (f" and {environment.pins}" if environment.pins else "")
    _say(f"installing {what} into {environment.path} with pip; the first time this takes minutes")
    began = time.monotonic()
    try:
        run_step(pip_command(environment, ["-e", target]), root, lock)
        if environment.pins:
            run_step(pip_command(environment, ["--no-deps", "-r", environment.pins]), root, lock)
    except InstallError:
        if former:
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

    Waits for another installation of the same checkout.

    Raises:
        InstallError: a compiler or header is missing, or the compilation failed.
    """
    _require_tools()
    with locked(root) as (lock, _):
        _compile(root, python, lock)


def _works(python: Path) -> bool:
    """Whether the environment's Python starts, is of our ABI and has pip."""
    import subprocess

    argv = [str(python), "-I", "-c", "import sys, pip; print(sys.implementation.cache_tag)"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == sys.implementation.cache_tag.encode()


def _make_venv(environment: Environment, lock: int) -> None:
    import importlib.util

    # not the Python of the .venv that is about to be cleared
    base = str(getattr(sys, "_base_executable", sys.executable))
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise InstallError(
            f"{base} cannot make an environment; missing:\n  - its venv module: apt-get install"
            " python3-venv"
        )
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
                        _say(f"{folder} is unfinished or has no working Python; it is made anew")
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
        _say(str(error))
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
