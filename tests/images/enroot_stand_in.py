"""A program `enroot` for machines that have none: it really enters images, as root, with
unsquashfs, loop mounts and bwrap.

Written after enroot 3.5's own behaviour (https://github.com/NVIDIA/enroot: enroot.in,
src/runtime.sh, src/docker.sh, bin/enroot-switchroot.c, conf/mounts): what it mounts, in which order
the environment is set, that the shell is a login shell unless ENROOT_LOGIN_SHELL says no, that
the image is read-only without --rw, its messages and its exit code 1. Without its hooks. `import`
knows dockerd:// and podman://, not registries.

It runs with the standard library alone, by the name that `install` gives it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

VERSION = "3.5.0"
NO = re.compile(r"no?|N[oO]?|[fF](alse)?|FALSE")  # what enroot reads as no
ENTER = "enter-namespaces"  # the second half of `start`, in a mount namespace of its own
# conf/mounts/10-system.fstab; /run, since /var/run is a link to it
SYSTEM = (
    ("--dev-bind", "/dev", "/dev"),
    ("--bind", "/proc", "/proc"),
    ("--ro-bind", "/sys", "/sys"),
    ("--tmpfs", "/tmp"),
    ("--tmpfs", "/run"),
)
CONFIG = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")  # conf/mounts/20-config.fstab


def install(folder: Path) -> Path:
    """Put the program `enroot` into a folder, for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "enroot"
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {shlex.quote(__file__)} "$@"\n'
    )
    program.chmod(0o755)
    return folder


def fail(message: str) -> NoReturn:
    """As common::err."""
    print(f"[ERROR] {message}", file=sys.stderr)
    sys.exit(1)


def says(name: str, default: bool = False) -> bool:
    """Whether a variable of ENROOT_* is on."""
    value = os.environ.get(name)
    return default if value is None else not (value == "" or NO.fullmatch(value))


def data_path() -> Path:
    """Where containers are kept."""
    home = os.environ.get("XDG_DATA_HOME") or f"{os.environ.get('HOME', '/root')}/.local/share"
    return Path(os.environ.get("ENROOT_DATA_PATH") or f"{home}/enroot")


def is_image(path: Path) -> bool:
    """Whether unsquashfs can read its superblock."""
    return (
        path.is_file()
        and subprocess.run(
            ["unsquashfs", "-s", str(path)], capture_output=True, check=False
        ).returncode
        == 0
    )


def create(given: argparse.Namespace) -> int:
    """runtime::create."""
    image = Path(given.image)
    if not image.is_file():
        fail(f"No such file or directory: {image.absolute()}")
    if not is_image(image):
        fail(f"Invalid image format: {image.absolute()}")
    name = given.name or image.name.removesuffix(".sqsh")
    if "/" in name:
        fail(f"Invalid argument: {name}")
    root = data_path() / name
    if root.exists():
        fail(f"File already exists: {root}")
    data_path().mkdir(parents=True, exist_ok=True)
    print("[INFO] Extracting squashfs filesystem...", file=sys.stderr)
    argv = ["unsquashfs", "-no-progress", "-user-xattrs", "-d", str(root), str(image)]
    return subprocess.run(argv, stdout=sys.stderr, check=False).returncode


def list_containers(given: argparse.Namespace) -> int:
    """runtime::list."""
    folder = data_path()
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    print("".join(f"{name}\n" for name in names), end="")
    return 0


def remove(given: argparse.Namespace) -> int:
    """runtime::remove."""
    for name in given.names:
        root = data_path() / name
        if "/" in name or not root.is_dir():
            fail(f"No such file or directory: {root}")
        shutil.rmtree(root)
    return 0


def start(given: argparse.Namespace) -> int:
    """runtime::start: checks, and then the namespaces."""
    image = Path(given.image)
    if not is_image(image):
        if "/" in given.image:
            fail(f"Invalid argument: {given.image}")
        image = data_path() / given.image
        if not image.is_dir():
            fail(f"No such file or directory: {image}")
    for mount in given.mount:
        if not re.fullmatch(r"\S+:\S+", mount):
            fail(f"Invalid argument: {mount}")
    for text in given.env:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*(=|$)", text):
            fail(f"Invalid argument: {text}")
    if given.rc and not Path(given.rc).is_file():
        fail(f"No such file or directory: {given.rc}")
    rest = json.dumps({**vars(given), "image": str(image.resolve()), "run": None})
    unshare = ["unshare", "--mount", "--propagation", "slave"]
    os.execvp("unshare", [*unshare, sys.executable, "-I", __file__, ENTER, rest])


def enter(text: str) -> NoReturn:
    """runtime::_start, in the namespaces: the process becomes bwrap, which starts the shell."""
    given = json.loads(text)
    image = Path(given["image"])
    work = Path(os.environ.get("ENROOT_RUNTIME_PATH", "/run/enroot"))
    work.mkdir(parents=True, exist_ok=True)
    quiet("mount", "-t", "tmpfs", "tmpfs", str(work))
    root = image if image.is_dir() else mount_image(image, work)
    has_rc = bool(given["rc"]) or (root / "etc/rc").is_file()
    mounts = [mount_words(text) for text in given["mount"]]
    mounts += [("--ro-bind", path, path) for path in CONFIG if Path(path).exists()]
    if given["rc"]:
        mounts.append(("--ro-bind", "/etc/rc", given["rc"]))
    for kind, target, source in mounts:
        make_target(root, target, kind == "--tmpfs" or Path(source).is_dir())
    env = environment(root, given["env"])
    shell = login(root, env)
    writable = bool(given["rw"]) or says("ENROOT_ROOTFS_WRITABLE")
    argv = ["bwrap", "--bind" if writable else "--ro-bind", str(root), "/", "--die-with-parent"]
    argv += [word for mount in SYSTEM for word in mount]
    argv += [word for kind, target, source in mounts for word in (kind, source, target) if word]
    argv += ["--chdir", "/", "--clearenv"]
    argv += [word for name, value in env.items() for word in ("--setenv", name, value)]
    os.execvp("bwrap", [*argv, *shell, *shell_words(has_rc, given["command"])])


def mount_image(image: Path, work: Path) -> Path:
    """The root of an image file: a loop mount below a tmpfs; unpacked where there are no loops."""
    for name in ("lower", "upper", "work", "root"):
        (work / name).mkdir()
    looped = subprocess.run(
        ["mount", "-t", "squashfs", "-o", "loop,ro", str(image), str(work / "lower")],
        capture_output=True,
        text=True,
        check=False,
    )
    if looped.returncode:
        (work / "lower").rmdir()
        quiet("unsquashfs", "-no-progress", "-d", str(work / "lower"), str(image))
    layers = f"lowerdir={work}/lower,upperdir={work}/upper,workdir={work}/work"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", layers, str(work / "root")],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        fail(f"Failed to mount: {image}: {done.stderr.strip()}")
    return work / "root"


def quiet(*argv: str) -> None:
    """Run it; ends this program with its words where it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{argv[0]}: {done.stderr.strip()}")


def make_target(root: Path, target: str, folder: bool) -> None:
    """x-create=auto, inside the image."""
    path = root.joinpath(*Path(target).parts[1:])
    with contextlib.suppress(FileExistsError):
        if folder:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def mount_words(text: str) -> tuple[str, str, str]:
    """(bwrap's option, target, source) of SOURCE:TARGET[:TYPE][:OPTIONS], fstab(5) with colons."""
    source, target, *more = text.split(":")
    options = ",".join(more).split(",")
    if source == "tmpfs":
        return "--tmpfs", target, ""
    if not Path(source).exists() and "nofail" not in options:
        fail(f"enroot-mount: failed to mount: {source} at {target}: No such file or directory")
    return ("--ro-bind" if "ro" in options else "--dev-bind"), target, source


def environment(root: Path, given: Sequence[str]) -> dict[str, str]:
    """runtime::_do_environ: the image's, over it what was given; a name alone is the caller's, and
    empty where the caller has none."""
    file = root / "etc/environment"
    lines = file.read_text().splitlines() if file.is_file() else []
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name] = substituted(value, os.environ)
    for text in given:
        name, equals, value = text.partition("=")
        found[name] = value if equals else os.environ.get(name, "")
    return found


def substituted(value: str, variables: Mapping[str, str]) -> str:
    """common::envsubst: ${NAME} and ${NAME:-OTHER}."""
    return re.sub(
        r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}",
        lambda match: variables.get(match[1]) or match[2] or "",
        value,
    )


def login(root: Path, env: dict[str, str]) -> list[str]:
    """The shell of enroot-switchroot; what a login sets where the image does not."""
    shell = env.get("SHELL", "/bin/sh")
    wanted = says("ENROOT_LOGIN_SHELL", True)
    if wanted:
        name, home, shell = person(root)
        values = {"TERM": "dumb", "HOME": home, "SHELL": shell, "USER": name, "LOGNAME": name}
        for key, value in {**values, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}.items():
            env.setdefault(key, value)
    if not os.path.lexists(root / shell.lstrip("/")):
        shell = "/bin/sh"
    return [shell, "-l"] if wanted else [shell]


def person(root: Path) -> tuple[str, str, str]:
    """(name, home, shell) of the user in the image."""
    path = root / "etc/passwd"
    lines = path.read_text().splitlines() if path.is_file() else []
    entries = [line.split(":") for line in lines]
    for entry in entries:
        if entry[2:3] == [str(os.getuid())]:
            return entry[0], entry[5], entry[6] or "/bin/sh"
    return str(os.getuid()), "/", "/bin/sh"


def shell_words(has_rc: bool, command: list[str]) -> list[str]:
    """sys_init of enroot-switchroot: the command script gets the command as arguments."""
    if has_rc:
        return ["/etc/rc", *command]
    if command:
        return ["-c", 'exec "$@"', "sh", *command]
    return []


def import_image(given: argparse.Namespace) -> int:
    """docker::daemon::import."""
    scheme, _, name = given.uri.partition("://")
    engine = {"dockerd": "docker", "podman": "podman"}.get(scheme)
    if engine is None:
        fail(f"Invalid argument: {given.uri}: this stand-in knows dockerd:// and podman://")
    output = Path(given.output or f"{re.sub('[:/]', '+', name)}.sqsh").absolute()
    if output.exists():
        fail(f"File already exists: {output}")
    work = Path(tempfile.mkdtemp(prefix="enroot."))
    try:
        return _import(engine, name, output, work)
    finally:
        subprocess.run([engine, "rm", "-f", "-v", work.name], capture_output=True, check=False)
        shutil.rmtree(work)


def _import(engine: str, name: str, output: Path, work: Path) -> int:
    root = work / "rootfs"
    root.mkdir()
    quiet(engine, "create", "--name", work.name, name, "/bin/true")
    with subprocess.Popen([engine, "export", work.name], stdout=subprocess.PIPE) as tar:
        unpack = ["tar", "-C", str(root), "--warning=no-timestamp", "--anchored", "-px"]
        done = subprocess.run(
            [*unpack, "--exclude=dev/*", "--exclude=.dockerenv"], stdin=tar.stdout, check=False
        )
    if done.returncode or tar.returncode:
        fail(f"{engine} export of {name} failed")
    inspected = json.loads(subprocess.check_output([engine, "inspect", name]))[0]
    configure(root, {key.lower(): value for key, value in inspected.items()}["config"])
    options = shlex.split(os.environ.get("ENROOT_SQUASH_OPTIONS", "-comp lzo -noD"))
    argv = ["mksquashfs", str(root), str(output), "-all-root", "-no-progress", *options]
    return subprocess.run(argv, stdout=sys.stderr, check=False).returncode


def configure(root: Path, config: Mapping[str, Any]) -> None:
    """docker::configure: what `start` reads of the image's configuration."""
    entry = shlex.join(config.get("Entrypoint") or [])
    command = shlex.join(config.get("Cmd") or ([] if entry else ["/bin/sh"]))
    place = shlex.quote(config.get("WorkingDir") or "/")
    volumes = config.get("Volumes") or {}
    files = {
        "fstab": "".join(
            f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n"
            for path in volumes
        ),
        "environment": "".join(f"{line}\n" for line in config.get("Env") or []),
        "rc": f"mkdir -p {place} 2> /dev/null\ncd {place} && unset OLDPWD || exit 1\n\n"
        "if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n"
        f'if [ $# -gt 0 ]; then\n    exec {entry} "$@"\nelse\n    exec {entry} {command}\nfi\n',
        "rc.local": "# This file is sourced by /etc/rc when the container starts.\n",
    }
    (root / "etc").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "etc" / name).write_text(text)


def parser() -> argparse.ArgumentParser:
    """enroot.in."""
    top = argparse.ArgumentParser(prog="enroot")
    verbs = top.add_subparsers(required=True)
    verb = verbs.add_parser("version")
    verb.set_defaults(run=lambda given: print(VERSION) or 0)
    verb = verbs.add_parser("import")
    verb.add_argument("-a", "--arch")
    verb.add_argument("-o", "--output", default="")
    verb.add_argument("uri")
    verb.set_defaults(run=import_image)
    verb = verbs.add_parser("create")
    verb.add_argument("-n", "--name", default="")
    verb.add_argument("-f", "--force", action="store_true")
    verb.add_argument("image")
    verb.set_defaults(run=create)
    verb = verbs.add_parser("list")
    verb.add_argument("-f", "--fancy", action="store_true")
    verb.set_defaults(run=list_containers)
    verb = verbs.add_parser("remove")
    verb.add_argument("-f", "--force", action="store_true")
    verb.add_argument("names", nargs="+")
    verb.set_defaults(run=remove)
    verb = verbs.add_parser("start")
    verb.add_argument("-e", "--env", action="append", default=[])
    verb.add_argument("-m", "--mount", action="append", default=[])
    verb.add_argument("--rc", default="")
    verb.add_argument("-r", "--root", action="store_true")
    verb.add_argument("-w", "--rw", action="store_true")
    verb.add_argument("image")
    verb.add_argument("command", nargs=argparse.REMAINDER)
    verb.set_defaults(run=start)
    return top


def main(words: Sequence[str]) -> int:
    """The program."""
    if words[:1] == [ENTER]:
        enter(words[1])
    given = parser().parse_args(words)
    code = given.run(given)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
